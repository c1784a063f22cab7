// Streams, events and errors of the device "late".
//
// A stream is a thread that runs tasks one at a time, in the order in which they were put. Nothing runs at the call:
// a task may be held back by a gate, by a delay, or until all other streams are idle.
//
// Invariants: one mutex, the monitor, guards all streams, marks and errors; no task runs and none is destroyed while
// it is held; it is the last lock that any thread takes. Waits of the host release Python's lock. Once a task has
// failed, its device runs no further work, but marks are still reached, so that nothing waits for ever.
// Not done here: memory (memory.h), operators (operators.cpp).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace late {

constexpr auto kLate = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;
constexpr int kPooledStreams = 32;  // of each priority; a stream asked for after these is one of them again

// How many tasks had been put on a stream when this one had been.
using Ticket = std::uint64_t;
using Work = std::function<void()>;
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

// One recording of an event. Who waits for an event waits for the mark it had then, whatever is recorded later.
struct Mark {
  StreamKey stream;
  Ticket ticket = 0;
  bool is_reached = false;                         // guarded by the monitor
  std::chrono::steady_clock::time_point reached_at;  // likewise
};

// -- Devices and their current streams, both of the calling thread

void set_device_count(int count);  // before the first use only
int device_count();
void check_device(c10::DeviceIndex device);  // throws if there is none of that index
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device, int priority);

// -- Work. Functions that throw a device's error say so.

Ticket put(c10::Stream stream, std::string name, Work work);          // throws
std::shared_ptr<Mark> put_mark(c10::Stream stream);                   // throws
void put_wait(c10::Stream stream, const std::shared_ptr<Mark>& mark);  // throws
Ticket last_ticket(StreamKey stream);
bool has_reached(StreamKey stream, Ticket ticket);
bool is_idle(c10::Stream stream);       // throws
bool is_waited_for(StreamKey stream);   // by a thread of the host, now
std::map<int, int> host_waits();        // for work that was not done yet, by the thread's gettid()
bool is_reached(const Mark& mark);      // throws
void wait_for(StreamKey stream, Ticket ticket);  // throws, but never before the ticket is reached
void wait_for(const Mark& mark);                 // likewise
void wait_for_device(c10::DeviceIndex device);   // likewise

// -- Errors

void check_error(c10::DeviceIndex device);  // throws what a task has failed with
void forget_errors();
// The task so many tasks after the next one whose name starts with `name` fails in place of running.
void fail(const std::string& name, int after);

// -- What tests set

void hold(StreamKey stream);     // no task of it starts until it is released
void release(StreamKey stream);
void run_last(StreamKey stream, bool last);  // it runs when somebody waits for it or no other stream can run
void dawdle(StreamKey stream, bool dawdles);  // it runs when somebody waits for it, who does not dawdle himself
// Before each task a stream sleeps so many microseconds, drawn anew from the seed and the stream.
void set_delays(std::int64_t least_us, std::int64_t most_us, std::uint64_t seed);
void set_delays(StreamKey stream, std::int64_t least_us, std::int64_t most_us, std::uint64_t seed);
// Device, stream, tasks put and tasks done, of each stream that has been used.
std::vector<std::tuple<int, std::int64_t, Ticket, Ticket>> list_streams();
void stop();  // at the end of the process: running tasks end, no other starts, nobody waits any more

inline StreamKey key(c10::Stream stream) { return {stream.device_index(), stream.id()}; }

}  // namespace late
