//! The inputs that the tests pass to a target: its stored seeds, and inputs of a generator whose
//! sequence never changes.

use std::path::Path;

/// Pseudo-random inputs per target.
const INPUTS: u32 = 2000;
/// The maximum size of an input.
const MAX_LEN: u64 = 1500;

/// Runs `target` on the files of `seeds/NAME` and on pseudo-random inputs.
///
/// # Panics
/// If the target does, if a seed cannot be read, or if there are none.
pub fn run(name: &str, target: fn(&[u8])) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("seeds")
        .join(name);
    let entries = std::fs::read_dir(&directory).expect("a directory of seeds");
    let mut seeds = 0;
    for entry in entries {
        let path = entry.expect("a seed's name").path();
        let seed = std::fs::read(&path).expect("a readable seed");
        target(&seed);
        seeds += 1;
    }
    assert!(seeds > 0, "there is no seed in {}", directory.display());
    let mut state = 0x9e37_79b9_7f4a_7c15;
    for _ in 0..INPUTS {
        let len = next(&mut state) % MAX_LEN;
        let dense = next(&mut state).is_multiple_of(2);
        let input: Vec<u8> = (0..len)
            .map(|_| {
                let byte = next(&mut state).to_le_bytes()[5];
                // Small numbers reach deeper than large ones.
                if dense || byte & 1 == 0 {
                    byte
                } else {
                    byte >> 5
                }
            })
            .collect();
        target(&input);
    }
}

/// xorshift64*.
fn next(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8
}
