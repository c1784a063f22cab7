// How operators have run so far.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace late {

struct Counts {
  std::int64_t asynchronous = 0;
  std::map<std::string, std::int64_t> waited;  // by operator: calls that waited, as no Meta kernel told their results
};

Counts counts();

}  // namespace late
