#include "streams.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

namespace late {
namespace {

struct Task {
  std::string name;
  Work work;                      // empty for marks and waits
  std::shared_ptr<Mark> after;    // it cannot start before this is reached
  std::shared_ptr<Mark> reaches;  // reached at its end
};

struct Delays {
  std::int64_t least_us = 0;
  std::int64_t most_us = 0;
  std::mt19937_64 draws;

  Delays() = default;
  Delays(std::int64_t least, std::int64_t most, std::uint64_t seed, StreamKey stream) : least_us(least), most_us(most) {
    std::seed_seq words{seed & 0xFFFFFFFF, seed >> 32, std::uint64_t(stream.first), std::uint64_t(stream.second)};
    draws.seed(words);
  }

  std::chrono::microseconds next() {
    if (most_us <= 0) return std::chrono::microseconds(0);
    return std::chrono::microseconds(least_us + std::int64_t(draws() % std::uint64_t(most_us - least_us + 1)));
  }
};

struct Worker {
  StreamKey key;
  std::condition_variable wake;
  std::deque<Task> tasks;
  Delays delays;
  Ticket put = 0, done = 0;
  Ticket wanted = 0;  // the host waits, or has waited, for this one
  int waiting = 0;    // threads of the host that wait for it now
  bool is_running = false, is_held = false, is_last = false, dawdles = false;
};

struct Failure {
  std::string name;
  int after;
};

// Everything that the monitor guards. It is never destroyed: threads use it until the process ends.
struct State {
  std::mutex monitor;
  std::condition_variable host;  // something was done
  std::map<StreamKey, std::unique_ptr<Worker>> workers;
  std::array<std::optional<std::string>, kMostDevices> errors;
  std::vector<Failure> failures;
  std::int64_t least_us = 0, most_us = 0;
  std::uint64_t seed = 0;
  std::array<std::array<int, 2>, kMostDevices> made{};  // streams asked for, by device and priority
  bool is_stopping = false;
  std::map<int, int> waits;  // of the host, by thread
};

State& state() {
  static State* made = new State;
  return *made;
}

using Lock = std::unique_lock<std::mutex>;

// Python's lock is free while the host waits: a task may need it.
class WithoutPython {
 public:
  WithoutPython() : saved_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (saved_) PyEval_RestoreThread(saved_);
  }
  WithoutPython(const WithoutPython&) = delete;
  WithoutPython& operator=(const WithoutPython&) = delete;

 private:
  PyThreadState* saved_;
};

// -- What may run: all of these with the monitor held

bool is_blocked(const Worker& worker) {
  return worker.tasks.empty() || worker.is_held ||
         (worker.tasks.front().after && !worker.tasks.front().after->is_reached);
}

bool is_wanted(const Worker& worker) {
  if (worker.wanted > worker.done) return true;
  for (const auto& [_, other] : state().workers) {
    if (other->tasks.empty()) continue;
    const auto& mark = other->tasks.front().after;
    if (mark && !mark->is_reached && mark->stream == worker.key && (!other->dawdles || is_wanted(*other))) return true;
  }
  return false;
}

bool is_any_other_busy(const Worker& worker) {
  for (const auto& [_, other] : state().workers) {
    if (other.get() != &worker && !other->is_last && (other->is_running || !is_blocked(*other))) return true;
  }
  return false;
}

bool may_start(const Worker& worker) {
  if (state().is_stopping || worker.is_running || is_blocked(worker)) return false;
  if (worker.dawdles) return is_wanted(worker);
  return !worker.is_last || is_wanted(worker) || !is_any_other_busy(worker);
}

void changed() {
  for (const auto& [_, worker] : state().workers) {
    if (may_start(*worker)) worker->wake.notify_one();
  }
  state().host.notify_all();
}

// A failure that a test has asked for, if this is its task.
bool is_to_fail(const std::string& name) {
  auto& failures = state().failures;
  for (auto failure = failures.begin(); failure != failures.end(); ++failure) {
    if (name.compare(0, failure->name.size(), failure->name) != 0) continue;
    if (failure->after-- > 0) continue;
    failures.erase(failure);
    return true;
  }
  return false;
}

// -- A stream's thread

std::string what_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours ? ours->what_without_backtrace() : error.what();
}

void run(Worker& worker) {
  Lock lock(state().monitor);
  for (;;) {
    worker.wake.wait(lock, [&] { return may_start(worker); });
    Task task = std::move(worker.tasks.front());
    worker.tasks.pop_front();
    worker.is_running = true;
    auto& error = state().errors[worker.key.first];
    std::string failed;
    if (task.work && !error) {
      const auto pause = worker.delays.next();
      const bool fails = is_to_fail(task.name);
      lock.unlock();
      if (pause.count() > 0) std::this_thread::sleep_for(pause);
      try {
        if (fails) throw std::runtime_error("a failure that a test asked for");
        task.work();
      } catch (const std::exception& caught) {
        failed = what_of(caught);
      }
    } else {
      lock.unlock();
    }
    task.work = nullptr;  // what it holds may need other locks
    lock.lock();
    if (!failed.empty() && !error) {
      error = task.name + " has failed on " + c10::Device(kLate, worker.key.first).str() + ", stream " +
              std::to_string(worker.key.second) + ": " + failed;
    }
    if (task.reaches) {
      task.reaches->is_reached = true;
      task.reaches->reached_at = std::chrono::steady_clock::now();
    }
    worker.is_running = false;
    ++worker.done;
    changed();
  }
}

// The worker of a stream, made when it is first asked for. With the monitor held.
Worker& worker_of(StreamKey key) {
  auto& worker = state().workers[key];
  if (!worker) {
    worker = std::make_unique<Worker>();
    worker->key = key;
    worker->delays = Delays(state().least_us, state().most_us, state().seed, key);
    std::thread([&worker = *worker] { run(worker); }).detach();
  }
  return *worker;
}

void throw_error(c10::DeviceIndex device) {
  if (const auto& error = state().errors[device]) {
    throw c10::AcceleratorError({__func__, __FILE__, std::uint32_t(__LINE__)}, 1, *error + " (said at a later call)");
  }
}

Ticket add(c10::Stream stream, Task task) {
  check_device(stream.device_index());
  Lock lock(state().monitor);
  throw_error(stream.device_index());
  auto& worker = worker_of(key(stream));
  const Ticket ticket = ++worker.put;
  if (task.reaches) task.reaches->ticket = ticket;
  worker.tasks.push_back(std::move(task));
  changed();
  return ticket;
}

// The host's wait for a stream. The monitor is let go of meanwhile.
void await(Lock& lock, StreamKey key, Ticket ticket) {
  auto& worker = worker_of(key);
  if (worker.done < ticket) ++state().waits[gettid()];
  worker.wanted = std::max(worker.wanted, ticket);
  ++worker.waiting;
  changed();
  state().host.wait(lock, [&] { return worker.done >= ticket || state().is_stopping; });
  --worker.waiting;
}

// -- Each thread's device and streams

std::atomic<int> g_count{2};
std::atomic<bool> g_is_counted{false};
thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> t_streams{};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLate, device), id);
}

}  // namespace

void set_device_count(int count) {
  TORCH_CHECK(count >= 1 && count <= kMostDevices, "late: 1 to ", kMostDevices, " devices, not ", count);
  TORCH_CHECK(!g_is_counted || count == g_count, "late: devices are in use already");
  g_count = count;
}

int device_count() {
  g_is_counted = true;
  return g_count;
}

void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "late: there is no device ", int(device));
}

c10::DeviceIndex current_device() { return t_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  check_device(device);
  return std::exchange(t_device, device);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = t_device;
  check_device(device);
  return stream_of(device, t_streams[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  check_device(stream.device_index());
  return stream_of(stream.device_index(), std::exchange(t_streams[stream.device_index()], stream.id()));
}

c10::Stream default_stream(c10::DeviceIndex device) {
  if (device < 0) device = t_device;
  check_device(device);
  return stream_of(device, 0);
}

c10::Stream new_stream(c10::DeviceIndex device, int priority) {
  if (device < 0) device = t_device;
  check_device(device);
  const int pool = priority < 0 ? 1 : 0;
  Lock lock(state().monitor);
  const int place = state().made[device][pool]++ % kPooledStreams;
  return stream_of(device, 1 + pool * kPooledStreams + place);
}

Ticket put(c10::Stream stream, std::string name, Work work) {
  return add(stream, {std::move(name), std::move(work), nullptr, nullptr});
}

std::shared_ptr<Mark> put_mark(c10::Stream stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = key(stream);
  add(stream, {"mark", nullptr, nullptr, mark});
  return mark;
}

void put_wait(c10::Stream stream, const std::shared_ptr<Mark>& mark) {
  if (mark) add(stream, {"wait", nullptr, mark, nullptr});
}

Ticket last_ticket(StreamKey stream) {
  Lock lock(state().monitor);
  return worker_of(stream).put;
}

bool has_reached(StreamKey stream, Ticket ticket) {
  Lock lock(state().monitor);
  return worker_of(stream).done >= ticket;
}

bool is_idle(c10::Stream stream) {
  Lock lock(state().monitor);
  throw_error(stream.device_index());
  const auto& worker = worker_of(key(stream));
  return worker.done == worker.put;
}

std::map<int, int> host_waits() {
  Lock lock(state().monitor);
  return state().waits;
}

bool is_waited_for(StreamKey stream) {
  Lock lock(state().monitor);
  return worker_of(stream).waiting > 0;
}

bool is_reached(const Mark& mark) {
  Lock lock(state().monitor);
  throw_error(mark.stream.first);
  return mark.is_reached;
}

void wait_for(StreamKey stream, Ticket ticket) {
  const WithoutPython released;
  Lock lock(state().monitor);
  await(lock, stream, ticket);
  throw_error(stream.first);
}

void wait_for(const Mark& mark) { wait_for(mark.stream, mark.ticket); }

void wait_for_device(c10::DeviceIndex device) {
  if (device < 0) device = t_device;
  check_device(device);
  const WithoutPython released;
  Lock lock(state().monitor);
  std::vector<std::pair<StreamKey, Ticket>> last;
  for (const auto& [key, worker] : state().workers) {
    if (key.first == device) last.emplace_back(key, worker->put);
  }
  for (const auto& [key, ticket] : last) await(lock, key, ticket);
  throw_error(device);
}

void check_error(c10::DeviceIndex device) {
  Lock lock(state().monitor);
  throw_error(device);
}

void forget_errors() {
  Lock lock(state().monitor);
  state().errors = {};
  state().failures.clear();
}

void fail(const std::string& name, int after) {
  Lock lock(state().monitor);
  state().failures.push_back({name, after});
}

void hold(StreamKey stream) {
  Lock lock(state().monitor);
  worker_of(stream).is_held = true;
  changed();
}

void release(StreamKey stream) {
  Lock lock(state().monitor);
  worker_of(stream).is_held = false;
  changed();
}

void run_last(StreamKey stream, bool last) {
  Lock lock(state().monitor);
  worker_of(stream).is_last = last;
  changed();
}

void dawdle(StreamKey stream, bool dawdles) {
  Lock lock(state().monitor);
  worker_of(stream).dawdles = dawdles;
  changed();
}

void set_delays(std::int64_t least_us, std::int64_t most_us, std::uint64_t seed) {
  Lock lock(state().monitor);
  state().least_us = least_us;
  state().most_us = most_us;
  state().seed = seed;
  for (const auto& [key, worker] : state().workers) worker->delays = Delays(least_us, most_us, seed, key);
}

void set_delays(StreamKey stream, std::int64_t least_us, std::int64_t most_us, std::uint64_t seed) {
  Lock lock(state().monitor);
  worker_of(stream).delays = Delays(least_us, most_us, seed, stream);
}

std::vector<std::tuple<int, std::int64_t, Ticket, Ticket>> list_streams() {
  Lock lock(state().monitor);
  std::vector<std::tuple<int, std::int64_t, Ticket, Ticket>> found;
  for (const auto& [key, worker] : state().workers)
    found.emplace_back(key.first, key.second, worker->put, worker->done);
  return found;
}

void stop() {
  const WithoutPython released;
  Lock lock(state().monitor);
  state().is_stopping = true;
  changed();
  state().host.wait(lock, [] {
    return std::none_of(state().workers.begin(), state().workers.end(),
                        [](const auto& worker) { return worker.second->is_running; });
  });
}

}  // namespace late
