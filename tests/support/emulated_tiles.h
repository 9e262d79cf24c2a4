// The instructions of AMX that the kernels use, emulated: for CPUs without it. Included before the kernels.
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

namespace emulated {

struct Tile {
    uint8_t rows[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;  // any use before that is a fault, as on a CPU with AMX

inline Tile& tile(int i) {
    if (!configured) abort();
    return tiles[i];
}
inline void configure(const void* shapes) {
    const uint8_t* bytes = (const uint8_t*)shapes;
    for (int i = 0; i < 8; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
        if (bytes[0] != 1 || row_bytes != 64 || bytes[48 + i] != 16) abort();
    }
    configured = true;
    for (Tile& t : tiles) t = {};
}
inline void release() { configured = false; }
inline void zero(int i) { tile(i) = {}; }
inline void load(int i, const void* base, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(tile(i).rows[r], (const uint8_t*)base + r * stride, 64);
}
inline void store(int i, void* base, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((uint8_t*)base + r * stride, tile(i).rows[r], 64);
}
inline float number(const uint8_t* at) {
    uint16_t half;
    memcpy(&half, at, 2);
    uint32_t bits = (uint32_t)half << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
inline void multiply(int to, int a, int b) {
    float second[32][16];  // number i of pair k of column n is second[2 * k + i][n]
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < 16; n++)
            for (int i = 0; i < 2; i++) second[2 * k + i][n] = number(tile(b).rows[k] + 4 * n + 2 * i);
    for (int m = 0; m < 16; m++) {
        float sums[16];
        memcpy(sums, tile(to).rows[m], sizeof(sums));
        for (int k = 0; k < 32; k++) {
            float first = number(tile(a).rows[m] + 2 * k);
            for (int n = 0; n < 16; n++) sums[n] += first * second[k][n];
        }
        memcpy(tile(to).rows[m], sums, sizeof(sums));
    }
}

}  // namespace emulated

#define _tile_loadconfig(shapes) emulated::configure(shapes)
#define _tile_release() emulated::release()
#define _tile_zero(i) emulated::zero(i)
#define _tile_loadd(i, base, stride) emulated::load(i, base, stride)
#define _tile_stored(i, base, stride) emulated::store(i, base, stride)
#define _tile_dpbf16ps(to, a, b) emulated::multiply(to, a, b)
