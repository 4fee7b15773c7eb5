// run_parts(parts, body) calls body(0) ... body(parts - 1), this thread among the workers: the OpenMP threads of the
// process where it has some (PyTorch brings them), else a pool of our own.
#pragma once

#include <functional>

namespace turnwise {

// Parts must not depend on which thread runs them. Safe from several threads at once (a second caller works alone) and
// after fork(). Exceptions must not leave body.
void run_parts(int parts, const std::function<void(int)>& body);

}  // namespace turnwise
