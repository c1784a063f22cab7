// Processes that share a path take turns on it: an I/O engine that lets requests through to
// another one only while this session holds the path's lock.
//
// Invariants: nothing is in flight in the inner engine without the lock. Requests reach it in
// the order of submission, one call at a time, from the submitting thread or from a thread of
// this class. A turn ends when nothing is left to do, or after turn_bytes if somebody waits for
// the lock; what is in flight at once stays below turn_bytes (a larger request goes alone).
//
// The lock is POSIX record locks on a file that is never read as data: byte 0 is the place of
// whoever is next in line, bytes 1..holders are the turns. Who wants a turn takes byte 0, then a
// turn, then gives byte 0 back: so who has just had a turn queues behind who waits already.
// A thread with a file table of its own takes and holds them. Record locks belong to a file
// table, so
//   * they go when the process dies, by SIGKILL too, whatever children it has left behind,
//   * no close() elsewhere in the process drops them, and no child inherits the descriptor,
//   * sessions of one process take turns like processes do,
//   * the kernel's deadlock detection, which would see a cycle where process 1 has path A and
//     waits for B and process 2 has B and waits for A, has none to see. There is no deadlock:
//     a turn never waits for another path.
// That thread waits in the kernel, not by polling, and may be left there at close.
//
// Not done here: naming and creating the lock file; saying anything to anybody (next_report()).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "../runtime/completion_queue.h"
#include "engine.h"

namespace offload {

// A turn that has not come yet.
struct TurnWait {
  double waited_s = 0.0;
  pid_t holder = 0;      // who has the turn, or else is next in line; 0: not visible from here
};

class TakingTurns final : public IoEngine {
 public:
  struct Settings {
    std::string lock_file;        // exists
    std::uint32_t holders = 1;    // turns at once, the same in all processes
    std::uint64_t turn_bytes = 0; // > 0
    double report_after_s = 0.0;  // wait that long before a report, twice that before the next
  };

  // inner and queue must outlive this. Throws std::system_error where there is no such lock:
  // the file cannot be opened, or the kernel grants no file table of its own (before Linux 5.9
  // that needs unshare(2), which containers forbid).
  TakingTurns(IoEngine& inner, CompletionQueue& queue, Settings settings);
  ~TakingTurns() override;
  TakingTurns(const TakingTurns&) = delete;
  TakingTurns& operator=(const TakingTurns&) = delete;

  void submit(IoRequest request) override;
  int register_buffers(void* address, std::size_t nbytes) override;
  int register_file(std::shared_ptr<StoreFile> file) override;
  void set_depth(std::size_t depth) override;

  // Finish everything and give the lock back; closes the inner engine too. Requests whose turn
  // has not come within report_after_s fail with ETIMEDOUT: the holder may never move again.
  void close() override;

  // Block until a turn has been waited for long enough to be told about; nullopt after close.
  // One thread at a time.
  std::optional<TurnWait> next_report();

  // The turn that is being waited for right now, if any.
  std::optional<TurnWait> waiting() const;

 private:
  struct State;
  const pid_t owner_;
  std::shared_ptr<State> state_;
};

}  // namespace offload
