// The instruction sets that kernels are compiled for, and the one that this machine gets.
#pragma once

namespace turnwise {

enum class Isa { baseline, avx2, avx512 };

// The best instruction set of the processor, or a lower one named by TURNWISE_ISA (baseline, avx2, avx512). Decided
// once.
Isa isa();
const char* isa_name();

}  // namespace turnwise
