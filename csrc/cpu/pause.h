// What a thread does between two looks at memory that another is about to change.
#pragma once

namespace specattn {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace specattn
