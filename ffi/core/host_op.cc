#include "core/host_op.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "core/completer.h"
#include "core/ledger.h"

namespace jax_overlap {
namespace {

namespace ffi = xla::ffi;

ffi::Error MakeError(const std::string& text) {
  return ffi::Error(ffi::ErrorCode::kInternal, text);
}

ffi::Future Failed(const std::string& text) {
  Ledger::Get().Record(text);
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(MakeError(text));
  return future;
}

// Runs all ranks; returns what went wrong, or nothing.
std::string Run(std::shared_ptr<HostProgram> program, const Schedule& schedule) {
  const HostSite& site = program->site();
  if (std::string error = program->Prepare(); !error.empty()) return site.what() + ": " + error;
  const int others = static_cast<int>(std::thread::hardware_concurrency()) - 1;
  const int tasks = program->tasks();
  const int helpers = program->wants_help() ? std::max(0, std::min(others, tasks - 1)) : 0;
  RunRanks(tasks, program->waits(), helpers, schedule,
           [program](int task, Waiter& waiter) { program->RunTask(task, waiter); });
  for (const Status& status : program->statuses()) {
    if (!status.failed) continue;
    return site.what() + ": rank " + std::to_string(status.rank) + " waited in vain for rank " +
           std::to_string(status.peer) + " in step " + std::to_string(status.step) +
           ": expected sequence number " + std::to_string(status.expected) + ", last seen word " +
           std::to_string(status.seen) + ". This is a fault of jax_overlap: please report it";
  }
  program->Finish();
  return "";
}

}  // namespace

std::string HostSite::Init(std::string_view op, int64_t abi, std::string_view axes,
                           ffi::Span<const int64_t> groups, int64_t group_size, int64_t node_size) {
  if (std::string error = CheckAttributes(op, abi, groups.size(), group_size, node_size);
      !error.empty()) {
    return error;
  }
  ranks_ = static_cast<int>(group_size);
  node_size_ = static_cast<int>(node_size);
  const std::vector<int32_t> devices(groups.begin(), groups.end());
  for (size_t i = 0; i < devices.size(); ++i) {
    const size_t id = devices[i];
    if (id >= position_.size()) position_.resize(id + 1, -1);
    position_[id] = static_cast<int32_t>(i);
  }
  for (auto first = devices.begin(); first != devices.end(); first += ranks_) {
    teams_.push_back(HostTeam::Of({first, first + ranks_}, node_size_));
  }
  rendezvous_ = Rendezvous::Make(std::string(op) + " over " + std::string(axes), ranks_);
  return "";
}

HostSite::Place HostSite::PlaceOf(uint32_t id) const {
  if (id >= position_.size() || position_[id] < 0) return {-1, -1};
  return {position_[id] / ranks_, position_[id] % ranks_};
}

ffi::Future ExecuteOnHost(const HostSite& site, ffi::RunId run, ffi::ThreadPool pool,
                          ffi::Buffer<ffi::U32> device, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, const MakeProgram& make_program) {
  static const pid_t first_process = getpid();
  if (getpid() != first_process) {
    return Failed(site.what() +
                  ": called in a forked process, where JAX's threads are missing. Start processes "
                  "with the 'spawn' method");
  }
  const auto [group, rank] = site.PlaceOf(device.typed_data()[0]);
  if (group < 0) return Failed(site.what() + ": this device is in no group of the call");

  Operands operands;
  ffi::DataType dtype = ffi::DataType::INVALID;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto in = args.get<ffi::AnyBuffer>(i);
    if (in.has_error()) return Failed(site.what() + ": bad operands");
    dtype = in->element_type();
    operands.inputs.push_back(in->untyped_data());
    operands.counts.push_back(in->element_count());
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (out.has_error()) return Failed(site.what() + ": bad results");
    operands.outputs.push_back((*out)->untyped_data());
  }
  if (!WithElementType(dtype, [](auto) {})) return Failed(site.what() + ": unexpected dtype");

  ffi::Promise promise;
  ffi::Future future(promise);
  Completion completion = [promise](const std::string* error) mutable {
    if (error == nullptr) {
      promise.SetAvailable();
    } else {
      promise.SetError(MakeError(*error));
    }
  };
  std::unique_ptr<HostCall> arrived =
      site.rendezvous().Arrive(run.run_id, group, rank, std::move(operands), std::move(completion));
  if (arrived != nullptr) {
    std::vector<Completion> others = std::move(arrived->completions);
    const Completion own = std::move(others[rank]);
    others.erase(others.begin() + rank);
    const Schedule schedule = [&pool](std::function<void()> task) {
      pool.Schedule(std::move(task));
    };
    const std::string error =
        Run(make_program(site.team(group), dtype, std::move(arrived)), schedule);
    if (!error.empty()) Ledger::Get().Record(error);
    Completer::CompleteAll(std::move(others), error);
    own(error.empty() ? nullptr : &error);  // nobody listens yet, so nothing runs here
  }
  return future;
}

}  // namespace jax_overlap
