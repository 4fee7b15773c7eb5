#include "bindings/bindings.h"
#include "bindings/state/archive.h"
#include "bindings/state/dict.h"
#include "bindings/state/list.h"
#include "bindings/state/state_types.h"
#include "bindings/state/tokens.h"
#include "bindings/state/versions.h"

namespace turnwise {

void bind_state(pybind11::module_& module) {
    namespace state = turnwise::state;
    PyObject* m = module.ptr();
    const auto exception = [&](const char* name, const char* doc, PyObject* base) {
        const std::string full = std::string("turnwise.state.") + name;
        PyObject* type = PyErr_NewExceptionWithDoc(full.c_str(), doc, base, nullptr);
        if (!type || PyModule_AddObjectRef(m, name, type) < 0) throw pybind11::error_already_set();
        return type;
    };
    state::types.error =
        exception("StateError", "A State was used in a way that it does not allow.", PyExc_RuntimeError);
    state::types.pruned = exception("PrunedError", "The State was pruned.", state::types.error);
    state::types.frozen = exception("FrozenError", "A write to a commit.", state::types.error);
    state::types.opaque = exception("OpaqueError", "An object without a policy for forking it.", PyExc_TypeError);
    state::types.checkpoint =
        exception("CheckpointError", "A file or pickle that is damaged or holds no States.", PyExc_ValueError);
    if (!state::make_state_types(m) || !state::make_dict_types(m) || !state::make_list_types(m) ||
        !state::make_tokens_type(m) || !state::add_version_methods() || !state::add_archive_methods()) {
        throw pybind11::error_already_set();
    }
}

}  // namespace turnwise
