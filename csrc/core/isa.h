// The instruction sets that kernels are compiled for, and the one that this machine gets.
#pragma once

namespace turnwise {

enum class Isa { baseline, avx2, avx512 };

// The best that the processor has, or what TURNWISE_ISA (baseline, avx2, avx512) lowers it to; decided once.
Isa isa();
const char* isa_name();

}  // namespace turnwise
