"""Parts that clients and servers share: lifetimes and checks, HTTP with keys, listeners, proxies, Hugging Face models.

Read in this order: base, http, listening, proxies, model_files, hf_model, norms, token_masks, experts, routed_experts.
May import: _C, types, utils, chat.
"""
