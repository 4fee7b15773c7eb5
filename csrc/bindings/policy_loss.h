// Reads the arguments of the policy loss as Python passes them. Two ops share these functions.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/tensor.h"
#include "ops/policy_loss.h"

namespace turnwise {

// Numbers and modes as ops.policy_loss packs them. Two tuples cost less than many arguments.
//   numbers: low, high, dual (of the variant), kl_coef, cap, reject_below, reject_above, max_length
//   modes: variant, kl, correction, aggregation, num_actors, kl_weighted; enumerators as integers
PolicyLossOptions policy_loss_options(const pybind11::tuple& numbers, const pybind11::tuple& modes, int threads);

// (logprobs, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, normalizer, actor_ids,
// entropy, selected)
PolicyLossInput policy_loss_input(const pybind11::tuple& streams, Reader read);

PolicyLossOutput policy_loss_output(pybind11::handle loss, pybind11::handle grad, pybind11::handle metrics,
                                    const PolicyLossInput& input, const PolicyLossOptions& options, Reader read);

}  // namespace turnwise
