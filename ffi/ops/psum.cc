// psum on the CPU: the FFI handler around the algorithms of psum.h.
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/completer.h"
#include "core/fibers.h"
#include "core/host_link.h"
#include "core/ledger.h"
#include "core/rendezvous.h"
#include "core/team.h"
#include "ops/handlers.h"
#include "ops/psum.h"
#include "xla/ffi/api/ffi.h"

namespace jax_overlap {
namespace {

namespace ffi = xla::ffi;

// Changes with the meaning of the attributes; jax_overlap/_native.py has the same.
constexpr int64_t kAbi = 1;

// The values of the attribute `algorithm`; jax_overlap/plan.py has the same.
enum class Algorithm : int64_t { kOneShot = 0, kTwoShot = 1, kNvrar = 2 };

// What every call of one HLO instruction has in common: the instantiate state.
struct PsumSite {
  static ffi::TypeId id;

  Algorithm algorithm;
  int ranks;
  int node_size;
  std::vector<int32_t> groups;                   // logical device ids, group by group
  std::vector<int32_t> position;                 // of a device in `groups`; -1: in none
  std::vector<std::shared_ptr<HostTeam>> teams;  // a group
  std::shared_ptr<Rendezvous> rendezvous;
};

ffi::TypeId PsumSite::id = {};

ffi::ErrorOr<std::unique_ptr<PsumSite>> Instantiate(int64_t abi, std::string_view axes,
                                                    ffi::Span<const int64_t> groups,
                                                    int64_t group_size, int64_t node_size,
                                                    int64_t algorithm) {
  if (abi != kAbi || group_size < 1 || node_size < 1 || groups.size() % group_size != 0 ||
      group_size % node_size != 0 || algorithm < 0 || algorithm > 2) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "psum: bad attributes. This program was made for another version of jax_overlap"));
  }
  auto site = std::make_unique<PsumSite>();
  site->algorithm = static_cast<Algorithm>(algorithm);
  site->ranks = static_cast<int>(group_size);
  site->node_size = static_cast<int>(node_size);
  site->groups.assign(groups.begin(), groups.end());
  for (size_t i = 0; i < site->groups.size(); ++i) {
    const size_t device = site->groups[i];
    if (device >= site->position.size()) site->position.resize(device + 1, -1);
    site->position[device] = static_cast<int32_t>(i);
  }
  for (size_t i = 0; i < site->groups.size(); i += site->ranks) {
    site->teams.push_back(HostTeam::Of(
        {site->groups.begin() + i, site->groups.begin() + i + site->ranks}, site->node_size));
  }
  site->rendezvous = Rendezvous::Make("jax_overlap.psum over " + std::string(axes), site->ranks);
  return site;
}

// Elements of a chunk: the slots of a channel have room for one.
constexpr size_t kOneShotChunkBytes = 16 << 10;
constexpr size_t kNvrarChunkBytes = 64 << 10;
constexpr size_t kUncut = size_t{1} << 40;

// Bytes of all ranks' operands from which a second thread pays for its wake-up.
constexpr size_t kHelpFromBytes = 1 << 20;

template <class F>
bool WithElementType(ffi::DataType dtype, F f) {
  switch (dtype) {
    case ffi::DataType::F32: f(float{}); return true;
    case ffi::DataType::BF16: f(BFloat16{}); return true;
    case ffi::DataType::F16: f(Float16{}); return true;
    case ffi::DataType::F64: f(double{}); return true;
    case ffi::DataType::S32: f(int32_t{}); return true;
    case ffi::DataType::S8: f(int8_t{}); return true;
    default: return false;
  }
}

// f(algorithm, elements in a chunk) with the class that implements the choice.
template <class T, class F>
void WithAlgorithm(Algorithm algorithm, F f) {
  switch (algorithm) {
    case Algorithm::kOneShot: return f(OneShot<T>{}, kOneShotChunkBytes / sizeof(T));
    case Algorithm::kTwoShot: return f(TwoShot<T, true>{}, kUncut);
    case Algorithm::kNvrar: return f(Nvrar<T, true>{}, kNvrarChunkBytes / sizeof(T));
  }
}

// One call, alive until the last thread that works on it has let go.
class PsumCall {
 public:
  PsumCall(const PsumSite& site, HostTeam& team, ffi::DataType dtype,
           std::unique_ptr<HostCall> call)
      : site_(site), team_(team), dtype_(dtype), call_(std::move(call)), statuses_(site.ranks) {}

  // Runs all ranks; returns what went wrong, or nothing.
  static std::string Run(std::shared_ptr<PsumCall> self, const Schedule& schedule) {
    std::string error = self->TakeChannel();
    if (!error.empty()) return error;
    const bool waits = self->site_.algorithm != Algorithm::kTwoShot;
    const int others = static_cast<int>(std::thread::hardware_concurrency()) - 1;
    const int helpers =
        self->TotalBytes() < kHelpFromBytes ? 0 : std::min(others, self->site_.ranks - 1);
    RunRanks(self->site_.ranks, waits, helpers, schedule,
             [self](int rank, Waiter& waiter) { self->RunRank(rank, waiter); });
    for (const Status& status : self->statuses_) {
      // The channel is not given back: its sequence numbers no longer agree.
      if (status.failed) return self->Describe(status);
    }
    self->team_.Give(std::move(self->channel_));
    return "";
  }

  HostCall& call() { return *call_; }

 private:
  std::string TakeChannel() {
    std::string error;
    WithElementType(dtype_, [&](auto t) {
      using T = decltype(t);
      WithAlgorithm<T>(site_.algorithm, [&](auto algorithm, size_t capacity) {
        const Channel::Key key{static_cast<int>(site_.algorithm), static_cast<int>(dtype_),
                               capacity};
        channel_ =
            team_.Take(key, PsumChannelBytes<decltype(algorithm)>(Shape(0), capacity), &error);
      });
    });
    return error.empty() ? error : site_.rendezvous->what() + ": " + error;
  }

  void RunRank(int rank, Waiter& waiter) {
    WithElementType(dtype_, [&](auto t) {
      using T = decltype(t);
      WithAlgorithm<T>(site_.algorithm, [&](auto algorithm, size_t capacity) {
        RunLeaves<decltype(algorithm), T>(rank, capacity, waiter);
      });
    });
  }

  template <class Algorithm, class T>
  void RunLeaves(int rank, size_t capacity, Waiter& waiter) {
    for (size_t leaf = 0; leaf < call_->counts.size(); ++leaf) {
      const void* const* inputs = call_->inputs.data() + leaf * site_.ranks;
      void* const* outputs = call_->outputs.data() + leaf * site_.ranks;
      HostLink<true> link(rank, site_.ranks, channel_->heaps.data(), inputs, outputs, waiter,
                          deadline_);
      RunPsum<Algorithm>(OneThread{}, link, Shape(rank), channel_->heaps[rank], capacity,
                         static_cast<const T*>(inputs[rank]), call_->counts[leaf],
                         static_cast<T*>(outputs[rank]));
      if (link.failed()) {
        statuses_[rank] = link.status();
        return;
      }
    }
  }

  TeamShape Shape(int rank) const { return {rank, site_.ranks, site_.node_size}; }

  size_t TotalBytes() const {
    size_t elements = 0;
    for (size_t count : call_->counts) elements += count;
    return elements * ffi::ByteWidth(dtype_) * site_.ranks;
  }

  std::string Describe(const Status& status) const {
    return site_.rendezvous->what() + ": rank " + std::to_string(status.rank) +
           " waited in vain for rank " + std::to_string(status.peer) + " in step " +
           std::to_string(status.step) + ": expected sequence number " +
           std::to_string(status.expected) + ", last seen word " + std::to_string(status.seen) +
           ". This is a fault of jax_overlap: please report it";
  }

  const PsumSite& site_;
  HostTeam& team_;
  const ffi::DataType dtype_;
  const std::unique_ptr<HostCall> call_;
  std::unique_ptr<Channel> channel_;
  std::vector<Status> statuses_;
  const HostLink<true>::Clock::time_point deadline_ =
      HostLink<true>::Clock::now() + Rendezvous::WaitTimeout();
};

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

ffi::Future Execute(PsumSite* site, ffi::RunId run, ffi::ThreadPool pool, ffi::Dictionary,
                    ffi::Buffer<ffi::U32> device, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  static const pid_t first_process = getpid();
  if (getpid() != first_process) {
    return Failed(
        "jax_overlap.psum: called in a forked process, where JAX's threads are missing. "
        "Start processes with the 'spawn' method");
  }
  const uint32_t id = device.typed_data()[0];
  if (id >= site->position.size() || site->position[id] < 0) {
    return Failed("jax_overlap.psum: device " + std::to_string(id) + " is in no group of the call");
  }
  const int position = site->position[id];
  const int group = position / site->ranks, rank = position % site->ranks;

  Operands operands;
  ffi::DataType dtype = ffi::DataType::INVALID;
  for (size_t leaf = 0; leaf < args.size(); ++leaf) {
    auto in = args.get<ffi::AnyBuffer>(leaf);
    auto out = rets.get<ffi::AnyBuffer>(leaf);
    if (in.has_error() || out.has_error()) return Failed("jax_overlap.psum: bad operands");
    dtype = in->element_type();
    operands.inputs.push_back(in->untyped_data());
    operands.outputs.push_back((*out)->untyped_data());
    operands.counts.push_back(in->element_count());
  }
  if (!WithElementType(dtype, [](auto) {})) return Failed("jax_overlap.psum: unexpected dtype");

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
      site->rendezvous->Arrive(run.run_id, group, rank, std::move(operands), std::move(completion));
  if (arrived != nullptr) {
    auto call = std::make_shared<PsumCall>(*site, *site->teams[group], dtype, std::move(arrived));
    const Schedule schedule = [&pool](std::function<void()> task) {
      pool.Schedule(std::move(task));
    };
    const std::string error = PsumCall::Run(call, schedule);
    if (!error.empty()) Ledger::Get().Record(error);
    std::vector<Completion>& completions = call->call().completions;
    std::swap(completions[rank], completions.back());  // this rank's own comes last
    Completer::CompleteAll(std::move(completions), error, schedule);
  }
  return future;
}

XLA_FFI_DEFINE_HANDLER(kPsumInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<int64_t>("abi")
                           .Attr<std::string_view>("axes")  // for messages
                           .Attr<ffi::Span<const int64_t>>("groups")
                           .Attr<int64_t>("group_size")
                           .Attr<int64_t>("node_size")
                           .Attr<int64_t>("algorithm"));

XLA_FFI_DEFINE_HANDLER(kPsumExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<PsumSite>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::ThreadPool>()
                           .Attrs()                       // read at instantiation
                           .Arg<ffi::Buffer<ffi::U32>>()  // logical id of this device
                           .RemainingArgs()               // the leaves, of one dtype
                           .RemainingRets());             // their sums

ffi::TypeInfo kPsumSiteInfo = ffi::MakeTypeInfo<PsumSite>();

}  // namespace

Handler PsumHandler() {
  return {"jax_overlap.psum",
          reinterpret_cast<void*>(kPsumInstantiate),
          reinterpret_cast<void*>(kPsumExecute),
          "jax_overlap.psum_site",
          &PsumSite::id,
          &kPsumSiteInfo};
}

}  // namespace jax_overlap
