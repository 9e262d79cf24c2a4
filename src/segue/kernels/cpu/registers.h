// What the CPU's kernels share: registers of AVX512-BF16 and tiles of AMX, and numbers packed for both.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using bf16 = uint16_t;
constexpr int kLanes = 32;          // bfloat16 numbers per register
constexpr int64_t kTileBytes = 64;  // of a row of a tile of AMX

// The tiles of AMX in a thread while it lives: eight tiles of 16 rows of 64 bytes. Without `on` it does
// nothing.
class TileSession {
   public:
    explicit TileSession(bool on) : on_(on) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 8; i++) shapes.row_bytes[i] = kTileBytes, shapes.rows[i] = 16;
        asm volatile("" ::"r"(&shapes) : "memory");  // the compiler takes it that only a part is read
        if (on_) _tile_loadconfig(&shapes);
    }
    ~TileSession() {
        if (on_) _tile_release();
    }
    TileSession(const TileSession&) = delete;
    TileSession& operator=(const TileSession&) = delete;

   private:
    bool on_;
};

// Loads of tiles read memory that the compiler does not know of: what is written before has to be there.
inline void finish_stores() { asm volatile("" ::: "memory"); }

inline __m512bh load_bf16(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512bh load_bf16(const bf16* p, __mmask32 mask) {
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
}
inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m512 load_float(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline __m512 load_float(const bf16* p, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __mmask16 first16(int64_t n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }
inline __mmask32 first32(int64_t n) { return n >= 32 ? 0xffffffffu : (__mmask32)((1u << n) - 1); }

// Returns e**x; x may be -inf. Relative error below 3e-7.
inline __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // in this order, NaN stays NaN
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

inline __m512 silu(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// Returns the sums of the 16 registers' lanes: lane i is the sum of a[i].
inline __m512 sums(const __m512* a) {
    __m512 b[8], c[4], d[2];
    for (int i = 0; i < 8; i++)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                             _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; i++)
        d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
}

// Packs up to 16 rows of `size` numbers as columns of pairs: [size / 2][16][2], with zeros for missing rows,
// and up to a size that is a multiple of 32.
inline void pack_columns(const bf16* const* rows, int64_t count, bf16* out, int64_t size) {
    for (int64_t d = 0; d < size; d += kLanes) {
        __mmask32 mask = first32(size - d);
        __m512i r[16], t[16];
        for (int i = 0; i < 16; i++)
            r[i] = i < count ? (__m512i)load_bf16(rows[i] + d, mask) : _mm512_setzero_si512();
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int j = 0; j < 2; j++) {
                r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
                r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
            }
        // The quarters of r[j], r[4 + j], r[8 + j] and r[12 + j] belong to four pairs.
        for (int j = 0; j < 4; j++) {
            __m512i even = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88),
                    odd = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
            __m512i even2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88),
                    odd2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
            bf16* to = out + d / 2 * 32 + j * 32;
            _mm512_storeu_si512(to, _mm512_shuffle_i32x4(even, even2, 0x88));
            _mm512_storeu_si512(to + 4 * 32, _mm512_shuffle_i32x4(odd, odd2, 0x88));
            _mm512_storeu_si512(to + 8 * 32, _mm512_shuffle_i32x4(even, even2, 0xdd));
            _mm512_storeu_si512(to + 12 * 32, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
        }
    }
}

// Turns rows into columns.
inline void transpose(__m512* r) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d low = _mm512_castps_pd(t[i + j]), high = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 4; j++) {
        r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
        r[j + 4] = _mm512_shuffle_f32x4(t[j + 4], t[j + 12], 0x88);
        r[j + 12] = _mm512_shuffle_f32x4(t[j + 4], t[j + 12], 0xdd);
    }
}

// Packs up to 16 values of one head as rows of pairs: [8][dim][2], with zeros for missing values.
inline void pack_values(const bf16* const* rows, int64_t count, bf16* out, int64_t dim) {
    alignas(64) bf16 order[32];
    for (int i = 0; i < 32; i++) order[i] = i / 2 + i % 2 * 32;
    __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t j = 0; j < 16; j += 2)
        for (int64_t d = 0; d < dim; d += kLanes) {
            __m512i a = j < count ? _mm512_loadu_si512(rows[j] + d) : _mm512_setzero_si512();
            __m512i b = j + 1 < count ? _mm512_loadu_si512(rows[j + 1] + d) : _mm512_setzero_si512();
            _mm512_storeu_si512(out + j * dim + 2 * d, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(out + j * dim + 2 * d + 32, _mm512_permutex2var_epi16(a, high, b));
        }
}

}  // namespace
