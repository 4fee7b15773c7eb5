// The instruction sets that kernels are compiled for, and the one that this process uses.
#pragma once

namespace turnwise {

enum class Isa {
    baseline,  // what the compiler assumes: SSE2 on x86-64, NEON on aarch64
    avx2,      // with FMA and F16C
    avx512     // F, BW, VL and DQ
};

// The best instruction set of the processor, or a lower one named by TURNWISE_ISA (baseline, avx2, avx512). The first
// call decides.
Isa isa();
const char* isa_name();

}  // namespace turnwise
