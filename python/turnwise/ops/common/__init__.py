"""Parts that every op uses: choice of a backend, layouts of tensors, Triton helpers.

Read in this order: dispatch, layout, triton.
May import: _C.
"""
