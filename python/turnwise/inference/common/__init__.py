"""Parts that clients share: their lifetime and checks, HTTP with keys, proxies, and Hugging Face models.

Read in this order: base, http, proxies, hf_model, token_masks.
May import: types, utils, chat.
"""
