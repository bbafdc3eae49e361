// The tables of handlers as Python registers them, for the modules of all platforms.
#pragma once

#include "core/handler.h"
#include "nanobind/nanobind.h"

namespace jax_overlap {

// FFI targets: name -> stage -> capsule.
template <class Handlers>
nanobind::dict TargetsOf(const Handlers& handlers) {
  nanobind::dict targets;
  for (const Handler& handler : handlers) {
    nanobind::dict stages;
    stages["instantiate"] = nanobind::capsule(handler.instantiate);
    if (handler.initialize != nullptr) {
      stages["initialize"] = nanobind::capsule(handler.initialize);
    }
    stages["execute"] = nanobind::capsule(handler.execute);
    targets[handler.target] = stages;
  }
  return targets;
}

// FFI state types: name -> type_id, type_info.
template <class Handlers>
nanobind::dict StateTypesOf(const Handlers& handlers) {
  nanobind::dict types;
  for (const Handler& handler : handlers) {
    nanobind::dict type;
    type["type_id"] = nanobind::capsule(handler.state_id);
    type["type_info"] = nanobind::capsule(handler.state_info);
    types[handler.state_name] = type;
  }
  return types;
}

}  // namespace jax_overlap
