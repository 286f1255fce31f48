//! Random bytes and ids.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns bytes from the kernel's random number generator.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..)
        && !rest.is_empty()
    {
        filled += getrandom(rest, GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// Returns a random id of 64 hexadecimal digits, as docker's containers have.
///
/// # Errors
/// The kernel has no random bytes.
pub fn random_id() -> io::Result<String> {
    let bytes: [u8; 32] = random()?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_long_and_differ() {
        let (a, b) = (random_id().unwrap(), random_id().unwrap());
        assert_eq!(a.len(), 64);
        assert!(a.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_ne!(a, b);
    }
}
