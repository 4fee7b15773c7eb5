// Reads a torch tensor as a View, without a copy, without torch headers and for any torch version: by DLPack from torch
// 2.10 on, else through its attributes.
#pragma once

#include <pybind11/pybind11.h>

#include "core/view.h"

namespace turnwise {

// None gives an empty View. A NumPy array is read as it is, without torch. Throws TypeError, which names the argument,
// for anything but a strided CPU tensor or array of at most two dimensions. The tensor must outlive the View.
View view_of(pybind11::handle tensor, const char* name);

// The same for a CUDA tensor; in a build that emulates CUDA, for a CPU tensor.
View cuda_view_of(pybind11::handle tensor, const char* name);

using Reader = View (*)(pybind11::handle, const char*);  // view_of or cuda_view_of

}  // namespace turnwise
