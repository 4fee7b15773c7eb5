// A torch tensor as a View, read through its own attributes: no torch header, no copy, any torch version (by DLPack
// from 2.10 on).
#pragma once

#include <pybind11/pybind11.h>

#include "core/view.h"

namespace turnwise {

// None gives an empty View. Throws TypeError for anything but a strided CPU tensor of at most two dimensions, naming
// it. The tensor must outlive the View.
View view_of(pybind11::handle tensor, const char* name);

// The same for a CUDA tensor; in a build that emulates CUDA, for a CPU tensor.
View cuda_view_of(pybind11::handle tensor, const char* name);

using Reader = View (*)(pybind11::handle, const char*);  // one of the two

}  // namespace turnwise
