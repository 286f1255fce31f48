//! 64-bit registers that a driver accesses in halves, one selected at a time.

/// Returns the low (0) or high (1) half; other selectors select nothing (§4.1.4.3, §4.2.2).
pub(super) fn half(value: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

/// Sets one half.
pub(super) fn set_half(value: &mut u64, select: u32, half: u32) {
    match select {
        0 => *value = (*value & 0xffff_ffff_0000_0000) | u64::from(half),
        1 => *value = (*value & 0xffff_ffff) | (u64::from(half) << 32),
        _ => {}
    }
}
