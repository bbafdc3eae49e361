// The CPU handlers of all ops: a line each.
#pragma once

namespace jax_overlap {

// An FFI target with its stages and its state type, as bindings.cc registers them.
struct Handler {
  const char* target;
  void* instantiate;
  void* execute;
  const char* state_name;
  void* state_id;
  void* state_info;
};

Handler AllGatherHandler();
Handler AllGatherMatmulHandler();
Handler AllToAllHandler();
Handler MatmulAllReduceHandler();
Handler MatmulReduceScatterHandler();
Handler PsumHandler();
Handler PsumScatterHandler();

}  // namespace jax_overlap
