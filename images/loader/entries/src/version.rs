//! The order of version numbers, as Debian's packages have it (deb-version(7)); the Boot Loader
//! Specification's and RPM's order is the same for what kernels are called.

use std::cmp::Ordering;

/// Compares two versions: runs of digits by their number, everything else by letters first, `~`
/// before even the end.
#[must_use]
pub fn compare(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a.as_bytes(), b.as_bytes());
    while !a.is_empty() || !b.is_empty() {
        loop {
            let (x, y) = (a.first().copied(), b.first().copied());
            let is_text = |byte: Option<u8>| byte.is_some_and(|byte| !byte.is_ascii_digit());
            if !is_text(x) && !is_text(y) {
                break;
            }
            match rank(x).cmp(&rank(y)) {
                Ordering::Equal => {}
                unequal => return unequal,
            }
            a = a.get(1..).unwrap_or_default();
            b = b.get(1..).unwrap_or_default();
        }
        let (x, rest_a) = number(a);
        let (y, rest_b) = number(b);
        (a, b) = (rest_a, rest_b);
        match x.len().cmp(&y.len()).then_with(|| x.cmp(y)) {
            Ordering::Equal => {}
            unequal => return unequal,
        }
    }
    Ordering::Equal
}

/// The place of a byte that is no digit; a digit and the end have the same.
fn rank(byte: Option<u8>) -> u16 {
    match byte {
        Some(b'~') => 0,
        Some(byte) if byte.is_ascii_alphabetic() => 2 + u16::from(byte),
        Some(byte) if !byte.is_ascii_digit() => 300 + u16::from(byte),
        _ => 1,
    }
}

/// Returns the digits at the start, without leading zeros, and what follows them.
fn number(text: &[u8]) -> (&[u8], &[u8]) {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, rest) = text.split_at(digits);
    let zeros = digits.iter().take_while(|byte| **byte == b'0').count();
    (digits.get(zeros..).unwrap_or_default(), rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn kernels_are_in_the_order_of_debian() {
        let ascending = [
            "5.10.0-9-amd64",
            "5.10.0-28-amd64",
            "6.1.0~rc1-amd64",
            "6.1.0-9-amd64",
            "6.1.0-50-amd64",
            "6.1.0-50-cloud-amd64",
            "6.8.0-31-generic",
            "6.12.9-200.fc41.x86_64",
            "6.12.10-200.fc41.x86_64",
        ];
        for pair in ascending.windows(2) {
            assert_eq!(compare(pair[0], pair[1]), Ordering::Less, "{pair:?}");
            assert_eq!(compare(pair[1], pair[0]), Ordering::Greater, "{pair:?}");
        }
        assert_eq!(compare("1.01", "1.1"), Ordering::Equal);
    }

    proptest! {
        #[test]
        fn it_is_an_order(a in "[0-9a-c.~-]{0,8}", b in "[0-9a-c.~-]{0,8}", c in "[0-9a-c.~-]{0,8}") {
            prop_assert_eq!(compare(&a, &b), compare(&b, &a).reverse());
            let mut all = [a, b, c];
            all.sort_by(|x, y| compare(x, y));
            prop_assert!(compare(&all[0], &all[2]) != Ordering::Greater);
        }
    }
}
