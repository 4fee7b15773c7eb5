// Input errors. The bindings turn InvalidInput into ValueError; the Python side then names the value as well.
#pragma once

#include <stdexcept>
#include <string>

namespace turnwise {

struct InvalidInput : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

inline void require(bool condition, const char* message) {
    if (!condition) throw InvalidInput(message);
}

}  // namespace turnwise
