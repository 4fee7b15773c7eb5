// One function per file of bindings. Each adds its ops to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace turnwise {

void bind_draw_tokens(pybind11::module_& module);
void bind_factorize(pybind11::module_& module);
void bind_gae(pybind11::module_& module);
void bind_group_advantage(pybind11::module_& module);
void bind_logprob(pybind11::module_& module);
void bind_grouped_policy_loss(pybind11::module_& module);
void bind_path_attention(pybind11::module_& module);
void bind_policy_loss(pybind11::module_& module);
void bind_rms_norm(pybind11::module_& module);
void bind_scale(pybind11::module_& module);
void bind_state(pybind11::module_& module);
void bind_token_rewards(pybind11::module_& module);
void bind_tree_attention(pybind11::module_& module);
void bind_trie(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);

}  // namespace turnwise
