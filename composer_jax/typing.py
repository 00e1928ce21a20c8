"""Shape checks on functions.

`typed` is for FUNCTIONS only: a pytree dataclass with checked fields breaks
tree-mapping to anything that is not an array (PartitionSpecs, shapes, None),
because unflattening calls the constructor.
"""

import beartype
import jaxtyping

typed = jaxtyping.jaxtyped(typechecker=beartype.beartype)
