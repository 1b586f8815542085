// Weights that underflow would be denormal numbers, which a processor makes by microcode: a step
// then takes ten times as long. As zeros they weigh the same.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace specattn {

// Results that underflow are zero while this lives, on its thread.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  const unsigned before_ = _mm_getcsr();
#endif
};

}  // namespace specattn
