//! Reading bytes from the front of a slice, without a way to read past its end.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The bytes that are not read yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_be_bytes)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn ipv4(&mut self) -> Option<Ipv4Addr> {
        self.array::<4>().map(Ipv4Addr::from)
    }

    pub(crate) fn ipv6(&mut self) -> Option<Ipv6Addr> {
        self.array::<16>().map(Ipv6Addr::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_past_the_end() {
        let mut reader = Reader::new(&[1, 2, 3]);
        assert_eq!(reader.u16(), Some(0x0102));
        assert_eq!(reader.u16(), None);
        assert_eq!(reader.take(2), None);
        assert_eq!(reader.u8(), Some(3));
        assert!(reader.is_empty());
        assert_eq!(reader.u8(), None);
    }
}
