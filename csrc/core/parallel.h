// run_parts(parts, body) calls body(0) ... body(parts - 1) on several threads; the calling thread works too. It uses
// the OpenMP threads of the process if an OpenMP runtime is loaded (PyTorch loads one), and a pool of its own
// otherwise.
#pragma once

#include <functional>

namespace turnwise {

// The result of a part must not depend on the thread that runs it. Several threads may call this at once: only one of
// them gets the workers, the others run all their parts themselves. It works after fork(). body must not throw.
void run_parts(int parts, const std::function<void(int)>& body);

}  // namespace turnwise
