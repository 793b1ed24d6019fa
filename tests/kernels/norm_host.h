// What norm_rope.cu needs of CUDA beyond rope.cu.
#pragma once

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
