// What the CPU handlers of all ops share: the call site, the way of a call from
// its first rank's arrival to its results, and the way of an error.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/element_type.h"
#include "core/fibers.h"
#include "core/handler.h"
#include "core/host_link.h"
#include "core/rendezvous.h"
#include "core/team.h"
#include "xla/ffi/api/ffi.h"

namespace jax_overlap {

// What all calls of one HLO instruction have in common: the part of an op's
// instantiate state that is not its own.
class HostSite {
 public:
  // `groups` holds logical device ids, group by group; a device's place in its
  // group is its rank. Returns an error text for attributes that make no sense.
  std::string Init(std::string_view op, int64_t abi, std::string_view axes,
                   xla::ffi::Span<const int64_t> groups, int64_t group_size, int64_t node_size);

  int ranks() const { return ranks_; }
  int node_size() const { return node_size_; }
  HostTeam& team(int group) const { return *teams_[group]; }
  Rendezvous& rendezvous() const { return *rendezvous_; }
  // Names the op and its axes, for errors.
  const std::string& what() const { return rendezvous_->what(); }

  struct Place {
    int group;
    int rank;
  };
  // Where device `id` stands; a negative group if in none.
  Place PlaceOf(uint32_t id) const;

 private:
  int ranks_ = 0;
  int node_size_ = 0;
  std::vector<int32_t> position_;                 // of a device among `groups`; -1: in none
  std::vector<std::shared_ptr<HostTeam>> teams_;  // of a group
  std::shared_ptr<Rendezvous> rendezvous_;
};

// One call of an op, at which all ranks have arrived. It lives until the last
// thread that works on it has let go.
class HostProgram {
 public:
  HostProgram(const HostSite& site, HostTeam& team, std::unique_ptr<HostCall> call)
      : site_(site), team_(team), call_(std::move(call)), statuses_(site.ranks()) {}
  virtual ~HostProgram() = default;

  // Takes what is needed; an error text if it is not to be had.
  virtual std::string Prepare() = 0;
  // Gives it back; not called after an error.
  virtual void Finish() = 0;
  // The pieces that the work is cut in: a rank's part each, where ranks wait for each
  // other, else as fine as it pays.
  virtual int tasks() const { return site_.ranks(); }
  virtual void RunTask(int task, Waiter& waiter) = 0;
  // Whether tasks wait for each other, and whether there is enough to do for others to
  // help, decide how they are run.
  virtual bool waits() const = 0;
  virtual bool wants_help() const = 0;

  const HostSite& site() const { return site_; }
  const HostCall& call() const { return *call_; }
  const std::vector<size_t>& counts() const { return call_->counts; }  // an input's elements
  const std::vector<Status>& statuses() const { return statuses_; }

 protected:
  HostTeam& team() { return team_; }
  HostLink<true>::Clock::time_point deadline() const { return deadline_; }
  void SetStatus(int rank, const Status& status) { statuses_[rank] = status; }

 private:
  const HostSite& site_;
  HostTeam& team_;
  const std::unique_ptr<HostCall> call_;
  std::vector<Status> statuses_;
  const HostLink<true>::Clock::time_point deadline_ =
      HostLink<true>::Clock::now() + Rendezvous::WaitTimeout();
};

// Bytes of all ranks' operands from which a second thread pays for its wake-up.
constexpr size_t kHelpFromBytes = 4 << 20;

// Makes an op's program for a call in which the operands have `dtype`.
using MakeProgram = std::function<std::shared_ptr<HostProgram>(
    HostTeam& team, xla::ffi::DataType dtype, std::unique_ptr<HostCall> call)>;

// A rank's execute stage: arrives with its operands (`args`, of one dtype, and `rets`),
// and runs the call if it is the last. The result is available, or has
// its error, when the future says so; the calling thread never waits.
xla::ffi::Future ExecuteOnHost(const HostSite& site, xla::ffi::RunId run, xla::ffi::ThreadPool pool,
                               xla::ffi::Buffer<xla::ffi::U32> device, xla::ffi::RemainingArgs args,
                               xla::ffi::RemainingRets rets, const MakeProgram& make_program);

// The execute stage of an op: its Site has the HostSite as `host`, its Program is made of
// (site, team, dtype, call).
template <class Site, class Program>
xla::ffi::Future ExecuteProgram(Site* site, xla::ffi::RunId run, xla::ffi::ThreadPool pool,
                                xla::ffi::Dictionary, xla::ffi::Buffer<xla::ffi::U32> device,
                                xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets) {
  return ExecuteOnHost(
      site->host, run, pool, device, args, rets,
      [site](HostTeam& team, xla::ffi::DataType dtype, std::unique_ptr<HostCall> call) {
        return std::make_shared<Program>(*site, team, dtype, std::move(call));
      });
}

// Defines `Handler name##Handler()` of an op. `instantiate` takes the attributes that all
// ops have, and then those of the binding `attributes`, and makes a `Site` of them.
#define JO_DEFINE_HANDLER(name, target, Site, Program, instantiate, attributes)                  \
  XLA_FFI_DEFINE_HANDLER(k##name##Instantiate, instantiate,                                      \
                         xla::ffi::Ffi::BindInstantiate()                                        \
                             .Attr<int64_t>("abi")                                               \
                             .Attr<std::string_view>("axes")                /* for messages */   \
                             .Attr<xla::ffi::Span<const int64_t>>("groups") /* devices */        \
                             .Attr<int64_t>("group_size")                                        \
                             .Attr<int64_t>("node_size") attributes);                            \
  XLA_FFI_DEFINE_HANDLER(k##name##Execute, (ExecuteProgram<Site, Program>),                      \
                         xla::ffi::Ffi::Bind()                                                   \
                             .Ctx<xla::ffi::State<Site>>()                                       \
                             .Ctx<xla::ffi::RunId>()                                             \
                             .Ctx<xla::ffi::ThreadPool>()                                        \
                             .Attrs()                                /* read at instantiation */ \
                             .Arg<xla::ffi::Buffer<xla::ffi::U32>>() /* this device's id */      \
                             .RemainingArgs()                                                    \
                             .RemainingRets());                                                  \
  static xla::ffi::TypeInfo k##name##Info = xla::ffi::MakeTypeInfo<Site>();                      \
  Handler name##Handler() {                                                                      \
    return {target,         reinterpret_cast<void*>(k##name##Instantiate),                       \
            nullptr,        reinterpret_cast<void*>(k##name##Execute),                           \
            target "_site", &Site::id,                                                           \
            &k##name##Info};                                                                     \
  }

}  // namespace jax_overlap
