#include "bindings/bindings.h"
#include "core/check.h"
#include "core/isa.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
    module.doc() = "The compiled core of turnwise. Use turnwise.ops: these functions convert no arguments.";
    py::register_exception<turnwise::InvalidInput>(module, "InvalidInput", PyExc_ValueError);
    module.def("isa", &turnwise::isa_name, "The instruction set in use: baseline, avx2 or avx512.");
    turnwise::bind_draw_tokens(module);
    turnwise::bind_factorize(module);
    turnwise::bind_gae(module);
    turnwise::bind_group_advantage(module);
    turnwise::bind_logprob(module);
    turnwise::bind_grouped_policy_loss(module);
    turnwise::bind_path_attention(module);
    turnwise::bind_policy_loss(module);
    turnwise::bind_rms_norm(module);
    turnwise::bind_scale(module);
    turnwise::bind_state(module);
    turnwise::bind_token_rewards(module);
    turnwise::bind_tree_attention(module);
    turnwise::bind_trie(module);
    turnwise::bind_cuda(module);
}
