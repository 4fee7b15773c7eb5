// The C++ core without Python: run by test_core.py, one line per failure, exit status 1 if there is any.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "core/float16.h"
#include "core/parallel.h"

using namespace turnwise;

static int failures = 0;

#define EXPECT(condition)                                               \
    do {                                                                \
        if (!(condition)) {                                             \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                 \
        }                                                               \
    } while (false)

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

int main() {
    test_float16();
    test_parallel();
    return failures != 0;
}
