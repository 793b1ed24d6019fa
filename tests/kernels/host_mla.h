// What mla.cu needs of CUDA beyond rope.cu and norm_rope.cu.
#pragma once

inline unsigned __shfl_xor_sync(unsigned mask, unsigned x, int lanes) {
  if (mask != 0xffffffffu) host::fail("a shuffle of some lanes");
  const int parity = host::lanes[host::current].meetings % 2, from = host::current ^ lanes;
  memcpy(&host::mailbox[parity][host::current], &x, sizeof x);
  host::meet();
  unsigned found;
  memcpy(&found, &host::mailbox[parity][from], sizeof found);
  return found;
}

// x y + z with one rounding: the sum in double and then in float, each rounded to odd (an inexact
// result ends in 1), remembers enough for the last rounding.
inline __nv_bfloat16 fma_bf16(__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 z) {
  const double a = double(__bfloat162float(x)) * double(__bfloat162float(y));
  const double b = __bfloat162float(z);
  double sum = a + b;
  if (!isfinite(sum)) return __float2bfloat16_rn(float(sum));
  const double back = sum - a, rest = (a - (sum - back)) + (b - back);
  int64_t bits;
  memcpy(&bits, &sum, sizeof bits);
  if (rest != 0 && bits % 2 == 0) sum = nextafter(sum, copysign(INFINITY, rest));
  float near = float(sum);
  if (!isfinite(near)) return __float2bfloat16_rn(near);
  const double left = sum - double(near);
  if (left != 0 && __float_as_uint(near) % 2 == 0) near = nextafterf(near, copysign(INFINITY, left));
  return __float2bfloat16_rn(near);
}
#define MLA_FMA_BF16(x, y, z) fma_bf16(x, y, z)
