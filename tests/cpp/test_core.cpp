// The C++ core without Python: run by test_core.py, one line per failure, exit status 1 if there is any.
#include <algorithm>
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
#include "ops/policy_loss_tile.h"
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

struct Tokens {
    std::vector<float> logprobs, old, ref, rollout, advantages;
    std::vector<uint8_t> mask;
};

// Masked tokens hold NaN, of which nothing may be seen.
static Tokens make_tokens(size_t n) {
    std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    Tokens t;
    for (size_t i = 0; i < n; ++i) {
        const bool trained = i % 5 != 0;
        const float logprob = -std::fabs(normal(generator)) * (i % 10 == 1 ? 30 : 1);
        const auto near = [&](bool far) { return trained ? logprob + normal(generator) * (far ? 30 : 0.5f) : NAN; };
        t.mask.push_back(trained);
        t.logprobs.push_back(trained ? logprob : NAN);
        t.old.push_back(near(i % 9 == 0));
        t.ref.push_back(near(i % 7 == 0));
        t.rollout.push_back(near(i % 8 == 0));
        t.advantages.push_back(!trained ? NAN : i % 11 == 0 ? 0 : normal(generator));
    }
    return t;
}

// The vector kernel against the same formulas over single floats, which is what a GPU runs. `advantage`: of all tokens,
// or NaN: each has its own. `weighted`: the KL term is multiplied by the ratio, through which its gradient goes too.
template <KlKind kind>
static void test_formulas(float advantage, bool with_rollout, bool weighted) {
    constexpr size_t n = 1013;
    const Tokens t = make_tokens(n);
    std::vector<float> grad(n, NAN);
    const bool per_token = std::isnan(advantage);
    Tile tile{};
    tile.n = int(n);
    tile.logprobs = t.logprobs.data();
    tile.old_logprobs = t.old.data();
    tile.ref_logprobs = t.ref.data();
    tile.rollout_logprobs = with_rollout ? t.rollout.data() : nullptr;
    tile.advantage = per_token ? 0 : advantage;
    tile.advantages = per_token ? t.advantages.data() : nullptr;
    tile.mask = t.mask.data();
    tile.grad = grad.data();
    tile.weight = 0.5f;
    tile.token_cap = 2;
    tile.reject_above = INFINITY;
    tile.row_weight = 1;
    tile.variant = {VariantKind::clip, 0.8f, 1.28f, with_rollout ? INFINITY : 3.0f};  // the dual clip off, and on
    tile.kl = kind;
    tile.kl_weighted = weighted;
    tile.kl_coef = 0.25f;
    TileSums sums;
    policy_loss_kernels().clip[weighted][int(kind)](tile, sums);

    double loss = 0, size = 0, k3 = 0;
    float ratio_max = 0;
    int tokens = 0, low = 0, high = 0, dual = 0;
    for (size_t i = 0; i < n; ++i) {
        if (!t.mask[i]) {
            EXPECT(grad[i] == 0);
            continue;
        }
        const float raw = t.logprobs[i] - t.old[i], bounded = clamp_symmetric<ScalarMath>(raw, kLogRatioBound);
        const float ratio = ScalarMath::exp(bounded), own = per_token ? t.advantages[i] : advantage;
        const auto range = clip_range<ScalarMath>(own, tile.variant);
        auto token = clipped_surrogate<ScalarMath>(ratio, true, bounded == raw, own, range);
        const auto kl = kl_term<ScalarMath, kind>(t.ref[i] - t.logprobs[i]);
        if (with_rollout) {
            const float mismatch = clamp_symmetric<ScalarMath>(t.old[i] - t.rollout[i], kLogRatioBound);
            const float weight = std::min(2.0f, std::exp(mismatch));
            token.loss *= weight;
            token.grad *= weight;
        }
        const double scale = weighted ? double(ratio) : 1, slope = weighted && bounded == raw ? double(kl.value) : 0;
        loss += double(token.loss) + 0.25 * scale * double(kl.value);
        size += std::fabs(double(token.loss)) + 0.25 * scale * std::fabs(double(kl.value));
        k3 += double(ratio) - 1 - double(bounded);
        ratio_max = std::max(ratio_max, ratio);
        tokens += 1;
        low += token.clipped_low;
        high += token.clipped_high;
        dual += token.clipped_dual;
        // Of a weighted term the parts may cancel: they are held to their own size.
        const double parts[] = {double(token.grad), 0.25 * scale * slope, -0.25 * scale * double(kl.slope)};
        const double expected = 0.5 * (parts[0] + parts[1] + parts[2]);
        const double part_size = std::fabs(parts[0]) + std::fabs(parts[1]) + std::fabs(parts[2]);
        EXPECT(close(grad[i], expected, 1e-5) ||
               (weighted && std::fabs(double(grad[i]) - expected) <= 1e-6 * part_size));
    }
    EXPECT(std::fabs(sums.loss - loss) <= 1e-6 * size);
    EXPECT(close(sums.k3, k3, 1e-6));
    EXPECT(close(sums.ratio_max, double(ratio_max), 1e-6));
    EXPECT(sums.tokens == tokens);
    EXPECT(sums.clipped_low == low);
    EXPECT(sums.clipped_high == high);
    EXPECT(sums.clipped_dual == dual);
    EXPECT((low > 0) == (per_token || advantage < 0));
    EXPECT((high > 0) == (per_token || advantage > 0));
    EXPECT((dual > 0) == (!with_rollout && (per_token || advantage < 0)));

    // Nothing trained: nothing of it, whatever the advantages are.
    const std::vector<uint8_t> nothing(n, 0);
    tile.mask = nothing.data();
    tile.advantage = NAN;
    TileSums none;
    policy_loss_kernels().clip[weighted][int(kind)](tile, none);
    EXPECT(none.loss == 0 && none.k3 == 0 && none.tokens == 0 && none.ratio_max == 0);
    for (float value : grad) EXPECT(value == 0);
}

template <KlKind kind>
static void test_formulas() {
    constexpr bool can_be_weighted =
        kind == KlKind::k1 || kind == KlKind::abs || kind == KlKind::k2 || kind == KlKind::k3;
    for (const bool with_rollout : {false, true}) {
        for (const float advantage : {NAN, 0.7f, -0.7f, 0.0f}) {
            test_formulas<kind>(advantage, with_rollout, false);
            if (can_be_weighted) test_formulas<kind>(advantage, with_rollout, true);
        }
    }
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
