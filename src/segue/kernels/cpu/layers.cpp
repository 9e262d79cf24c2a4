// Norms, rotary embedding and activation, on a CPU with AVX512-BF16. All tensors are bfloat16 unless said
// otherwise, rows are contiguous.
#include <cmath>
#include <cstring>

#include "registers.h"

extern "C" void add_rms_norm(const bf16* x, bf16* residual, const float* weight, bf16* out, int64_t rows,
                             int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size >= 16384)
    for (int64_t r = 0; r < rows; r++) {
        const bf16* xs = x + r * size;
        bf16* rs = residual ? residual + r * size : nullptr;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += 16) {
            __mmask16 mask = first16(size - i);
            __m512 v = load_float(xs + i, mask);
            if (rs) {
                __m256i sum = narrow(_mm512_add_ps(v, load_float(rs + i, mask)));
                _mm256_mask_storeu_epi16(rs + i, mask, sum);
                v = widen(sum);
            }
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        const bf16* total = rs ? rs : xs;
        __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / (float)size + eps));
        for (int64_t i = 0; i < size; i += 16) {
            __mmask16 mask = first16(size - i);
            __m512 v = _mm512_mul_ps(load_float(total + i, mask), scale);
            _mm256_mask_storeu_epi16(out + r * size + i, mask,
                                     narrow(_mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + i))));
        }
    }
}

extern "C" void norm_rope_store(bf16* qkv, const float* weight, float eps, const bf16* cos, const bf16* sin,
                                const int64_t* rows, bf16* keys, bf16* values, int64_t tokens, int64_t heads,
                                int64_t kv_heads, int64_t dim) {
    int64_t width = (heads + 2 * kv_heads) * dim, half = dim / 2;
#pragma omp parallel for schedule(static) if (tokens >= 16)
    for (int64_t t = 0; t < tokens; t++) {
        const bf16 *c = cos + t * dim, *s = sin + t * dim;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            bf16* x = qkv + t * width + h * dim;
            __m512 scale = _mm512_set1_ps(1.0f);
            if (weight) {
                __m512 squares = _mm512_setzero_ps();
                for (int64_t i = 0; i < dim; i += 16) {
                    __m512 v = load_float(x + i);
                    squares = _mm512_fmadd_ps(v, v, squares);
                }
                scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / (float)dim + eps));
            }
            for (int64_t i = 0; i < half; i += 16) {
                __m512 a = load_float(x + i), b = load_float(x + half + i);
                if (weight) {
                    a = _mm512_mul_ps(_mm512_mul_ps(a, scale), _mm512_loadu_ps(weight + h * dim + i));
                    b = _mm512_mul_ps(_mm512_mul_ps(b, scale), _mm512_loadu_ps(weight + h * dim + half + i));
                }
                __m512 y = _mm512_fmadd_ps(b, load_float(s + i), _mm512_mul_ps(a, load_float(c + i)));
                __m512 z =
                    _mm512_fmadd_ps(a, load_float(s + half + i), _mm512_mul_ps(b, load_float(c + half + i)));
                _mm256_storeu_si256((__m256i*)(x + i), narrow(y));
                _mm256_storeu_si256((__m256i*)(x + half + i), narrow(z));
            }
        }
        size_t bytes = kv_heads * dim * sizeof(bf16);
        memcpy(keys + rows[t] * kv_heads * dim, qkv + t * width + heads * dim, bytes);
        memcpy(values + rows[t] * kv_heads * dim, qkv + t * width + (heads + kv_heads) * dim, bytes);
    }
}

extern "C" void silu_mul(const bf16* gate_up, bf16* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size >= 16384)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < size; i += 16) {
            __mmask16 mask = first16(size - i);
            __m512 y = silu(load_float(gate_up + 2 * r * size + i, mask));
            y = _mm512_mul_ps(y, load_float(gate_up + (2 * r + 1) * size + i, mask));
            _mm256_mask_storeu_epi16(out + r * size + i, mask, narrow(y));
        }
}
