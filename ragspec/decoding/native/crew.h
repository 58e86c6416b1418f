// Threads that share out the units of one job after another.
//
// Not OpenMP: there a parallel region waits for every thread, and one that the system has put aside for its neighbours (the
// database, the other services of a small machine) holds up all of them, hundreds of times a step. Here a thread that is not
// running holds one unit at most, and the others do the rest of its share.
#pragma once

#include <functional>
#include <mutex>

namespace ragspec {

// Calls `work(unit)` for every unit in [0, units), on up to `threads` threads, and returns when all are done. One caller at a
// time. `work` must not throw.
void share_out(int threads, int units, const std::function<void(int)>& work);

// Held by whoever calls in from Python, from the first `share_out` to the last.
extern std::mutex crew_mutex;

}  // namespace ragspec
