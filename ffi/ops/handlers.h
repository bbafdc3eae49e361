// The CPU handlers of all ops: a line each.
#pragma once

namespace jax_overlap {

struct Handler;  // core/handler.h

Handler AllGatherHandler();
Handler AllGatherMatmulHandler();
Handler AllToAllHandler();
Handler MatmulAllReduceHandler();
Handler MatmulReduceScatterHandler();
Handler PsumHandler();
Handler PsumScatterHandler();

}  // namespace jax_overlap
