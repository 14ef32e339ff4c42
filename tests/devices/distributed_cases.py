""""""

import jax

KEY = jax.random.key(3)
