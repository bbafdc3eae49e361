// The Python module jax_overlap._ffi: the table of handlers, and the settings and
// errors of the native side.
#include "nanobind/nanobind.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/vector.h"

#include <chrono>

#include "core/handler_tables.h"
#include "core/ledger.h"
#include "core/rendezvous.h"
#include "core/team.h"
#include "ops/handlers.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;
using namespace jax_overlap;  // NOLINT

namespace {

const Handler kHandlers[] = {
    AllGatherHandler(),       AllGatherMatmulHandler(),     AllToAllHandler(),
    MatmulAllReduceHandler(), MatmulReduceScatterHandler(), PsumHandler(),
    PsumScatterHandler(),
};

}  // namespace

NB_MODULE(_ffi, m) {
  m.attr("api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#if defined(JAX_OVERLAP_TESTING)
  m.attr("testing") = true;
#else
  m.attr("testing") = false;
#endif
  m.def("targets", [] { return TargetsOf(kHandlers); }, "FFI targets: name -> stage -> capsule");
  m.def(
      "state_types", [] { return StateTypesOf(kHandlers); },
      "FFI state types: name -> type_id, type_info");
  m.def(
      "configure",
      [](double wait_timeout_s, size_t heap_bytes) {
        Rendezvous::SetWaitTimeout(std::chrono::duration<double>(wait_timeout_s));
        HostTeam::SetHeapBytes(heap_bytes);
      },
      nb::arg("wait_timeout_s"), nb::arg("heap_bytes"));
  m.def("report_errors_at_exit", [] { Ledger::Get().ReportAtExit(); });
  m.def("ledger", [] { return nb::capsule(&Ledger::Get()); });
  m.def("last_errors", [] { return Ledger::Get().Texts(); });
  m.def("clear_errors", [] { Ledger::Get().Clear(); });
}
