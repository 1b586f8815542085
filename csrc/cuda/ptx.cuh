// The instructions that C++ has no name for. ELEMENT is 0 for bfloat16, 1 for float16.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__

constexpr u32 kWholeWarp = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }
DEVICE float minus_infinity() { return __int_as_float(0xff800000); }
DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Keeps a value in its register: the compiler would rather compute it again in every step.
DEVICE u32 kept(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Copies 16 bytes to shared memory, past L1; what is not `valid` becomes 0 and is not read.
DEVICE void copy_async(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
DEVICE void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Counts up to `last` and around. Acquires and releases for the GPU: what this block did before a
// barrier is seen by whoever counts next, and the other way round.
DEVICE u32 count_in_order(u32* counter, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

// Counts this block; whether it is the last of `count`. The counter is 0 again behind the last.
DEVICE bool is_last(u32* counter, int count) {
  __shared__ int last;
  __syncthreads();
  if (threadIdx.x == 0) last = count_in_order(counter, count - 1) == count - 1;
  __syncthreads();
  return last;
}

// Waits for the other threads of a team: a warp, or `threads` of the block with a barrier of
// theirs.
template <int THREADS>
DEVICE void team_barrier(int team) {
  if constexpr (THREADS == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(THREADS) : "memory");
  }
}

DEVICE void load_shared(u32 (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
DEVICE void store_shared(u32 address, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
DEVICE void store_shared(u32 address, u16 x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, the rows of the i-th at the addresses of lanes [8i, 8i +
// 8).
DEVICE void load_matrices(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
DEVICE void load_matrices_transposed(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

#if ELEMENT == 0
#define ELEMENT_TYPE "bf16"
#define ELEMENT_EXPONENT 0x7f80
#else
#define ELEMENT_TYPE "f16"
#define ELEMENT_EXPONENT 0x7c00
#endif

// d [16, 8] += a [16, 16] b [16, 8], in float32.
DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT_TYPE "." ELEMENT_TYPE
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two elements in one register, `low` at the lower address.
DEVICE u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." ELEMENT_TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// Two elements times 0, added to `sum`, which so is 0 until one of them is NaN or infinite.
DEVICE u32 add_no_numbers(u32 both, u32 sum) {
  asm("fma.rn." ELEMENT_TYPE "x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(both), "r"(0));
  return sum;
}
// Two elements, of which those that are NaN or infinite become 0.
DEVICE u32 numbers_of(u32 both) {
  constexpr u32 kExponent = ELEMENT_EXPONENT;
  if ((both & kExponent) == kExponent) both &= 0xffff0000;
  if ((both >> 16 & kExponent) == kExponent) both &= 0xffff;
  return both;
}
DEVICE u32 pack_bfloat16(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
DEVICE float from_bfloat16(u16 bits) { return __int_as_float(static_cast<int>(bits) << 16); }
DEVICE float from_float16(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_approximate(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
