#include "core/isa.h"

#include <cstdlib>
#include <cstring>

namespace turnwise {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};

Isa detect() {
    Isa best = Isa::baseline;
#if defined(TURNWISE_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        best = Isa::avx2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
            best = Isa::avx512;
        }
    }
#endif
    // TURNWISE_ISA can only lower the choice; other values have no effect.
    if (const char* wanted = std::getenv("TURNWISE_ISA")) {
        for (int level = 0; level < int(best); ++level) {
            if (std::strcmp(wanted, kNames[level]) == 0) best = Isa(level);
        }
    }
    return best;
}

}  // namespace

Isa isa() {
    static const Isa chosen = detect();
    return chosen;
}

const char* isa_name() {
    return kNames[int(isa())];
}

}  // namespace turnwise
