// The C++ core without Python: run by test_core.py, one line per failure, exit status 1 if there is any.
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "core/check.h"
#include "core/float16.h"
#include "core/parallel.h"
#include "ops/factorize.h"
#include "ops/policy_loss_kernel.h"
#include "ops/scalar_math.h"

using namespace turnwise;

static int failures = 0;

#define EXPECT(condition)                                               \
    do {                                                                \
        if (!(condition)) {                                             \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                 \
        }                                                               \
    } while (false)

static bool close(double a, double b, double tolerance) {
    return std::fabs(a - b) <= tolerance * (1 + std::fabs(b));
}

// Every half and bfloat16 survives the way to float32 and back; halfway cases round to even.
static void test_float16() {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const Half half{uint16_t(bits)};
        const BFloat16 brain{uint16_t(bits)};
        if (std::isnan(to_float(half))) {
            EXPECT(std::isnan(to_float(to_half(to_float(half)))));
        } else {
            EXPECT(to_half(to_float(half)).bits == bits);
        }
        if (std::isnan(to_float(brain))) {
            EXPECT(std::isnan(to_float(to_bfloat16(to_float(brain)))));
        } else {
            EXPECT(to_bfloat16(to_float(brain)).bits == bits);
        }
    }
    EXPECT(to_half(1.0f + 0x1p-11f).bits == 0x3c00);
    EXPECT(to_half(1.0f + 0x3p-11f).bits == 0x3c02);
    EXPECT(to_half(65520.0f).bits == 0x7c00);
    EXPECT(to_half(65519.0f).bits == 0x7bff);
    EXPECT(to_half(0x1p-25f).bits == 0);
    EXPECT(to_half(0x1.8p-25f).bits == 1);
    EXPECT(to_bfloat16(1.0f + 0x1p-8f).bits == 0x3f80);
    EXPECT(to_bfloat16(1.0f + 0x3p-8f).bits == 0x3f82);
}

static void test_parallel() {
    for (int round = 0; round < 200; ++round) {
        std::vector<int> seen(size_t(round % 7), 0);
        run_parts(int(seen.size()), [&](int part) { ++seen[size_t(part)]; });
        for (int count : seen) EXPECT(count == 1);
    }
    std::vector<std::thread> callers;
    std::vector<int> sums(4, 0);
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&, caller] {
            for (int round = 0; round < 100; ++round) {
                std::vector<int> parts(5, 0);
                run_parts(5, [&](int part) { parts[size_t(part)] = part; });
                for (int part : parts) sums[size_t(caller)] += part;
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    for (int sum : sums) EXPECT(sum == 1000);
}

static void test_factorize() {
    const int64_t low = std::numeric_limits<int64_t>::min(), high = std::numeric_limits<int64_t>::max();
    const std::vector<int64_t> keys = {high, 3, low, 3, high, 0};
    std::vector<int64_t> ids(keys.size());
    EXPECT(factorize(keys.data(), int64_t(keys.size()), ids.data()) == 4);
    EXPECT((ids == std::vector<int64_t>{0, 1, 2, 1, 0, 3}));
    std::vector<int64_t> second = {0, 1, 0, 0, 0, 1};
    EXPECT(factorize_pairs(ids.data(), second.data(), 2, 6, ids.data()) == 5);
    EXPECT((ids == std::vector<int64_t>{0, 1, 2, 3, 0, 4}));
    EXPECT(factorize(nullptr, 0, nullptr) == 0);
}

// The vector kernel against the same formulas over single floats, which is what a GPU runs.
template <KlKind kind>
static void test_formulas() {
    std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    constexpr int n = 77;
    std::vector<float> logprobs(n), old(n), ref(n), advantages(n), grad(n);
    std::vector<uint8_t> mask(n);
    for (int i = 0; i < n; ++i) {
        logprobs[size_t(i)] = -std::fabs(normal(generator)) * (i % 10 == 0 ? 30 : 1);
        old[size_t(i)] = logprobs[size_t(i)] + normal(generator) * (i % 9 == 0 ? 30 : 0.5f);
        ref[size_t(i)] = logprobs[size_t(i)] + normal(generator) * (i % 7 == 0 ? 30 : 0.5f);
        advantages[size_t(i)] = i % 11 == 0 ? 0 : normal(generator);
        mask[size_t(i)] = i % 5 != 0;
    }
    Tile tile{};
    tile.n = n;
    tile.logprobs = logprobs.data();
    tile.old_logprobs = old.data();
    tile.ref_logprobs = ref.data();
    tile.advantages = advantages.data();
    tile.mask = mask.data();
    tile.grad = grad.data();
    tile.weight = 0.5f;
    tile.row_weight = 1;
    tile.variant = {VariantKind::clip, 0.8f, 1.28f, 3.0f};
    tile.kl = kind;
    tile.kl_coef = 0.25f;
    TileSums sums;
    kernels().clip[int(kind)](tile, sums);

    double loss = 0, size = 0;
    int tokens = 0, low = 0, high = 0, dual = 0;
    for (size_t i = 0; i < n; ++i) {
        if (!mask[i]) {
            EXPECT(grad[i] == 0);
            continue;
        }
        const auto bounded = clamp_symmetric<ScalarMath>(logprobs[i] - old[i], kLogRatioBound);
        const auto token =
            clipped_surrogate<ScalarMath>(ScalarMath::exp(bounded.value), bounded.cut, advantages[i], tile.variant);
        const auto kl = kl_term<ScalarMath, kind>(ref[i] - logprobs[i]);
        loss += double(token.loss) + 0.25 * double(kl.value);
        size += std::fabs(double(token.loss)) + 0.25 * std::fabs(double(kl.value));
        tokens += 1;
        low += token.clipped_low;
        high += token.clipped_high;
        dual += token.third;
        EXPECT(close(grad[i], 0.5 * (double(token.grad) + 0.25 * double(kl.grad)), 1e-5));
    }
    EXPECT(std::fabs(sums.loss - loss) <= 1e-6 * size);
    EXPECT(sums.tokens == tokens);
    EXPECT(sums.clipped_low == low);
    EXPECT(sums.clipped_high == high);
    EXPECT(sums.third == dual);
    EXPECT(low > 0 && high > 0 && dual > 0);
}

int main() {
    test_float16();
    test_parallel();
    test_factorize();
    test_formulas<KlKind::none>();
    test_formulas<KlKind::k1>();
    test_formulas<KlKind::abs>();
    test_formulas<KlKind::k2>();
    test_formulas<KlKind::k3>();
    test_formulas<KlKind::k1_plus>();
    test_formulas<KlKind::k3_plus>();
    return failures != 0;
}
