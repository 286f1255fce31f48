//! Kubernetes' quantities: `500m`, `1.5Gi`, `2e9`.
//!
//! A [`Quantity`] keeps the text that the user wrote, so that an object comes back as it was
//! sent. [`Quantity::amount`] reads it, exactly and within bounds.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Longer texts are no quantities.
const MAX_TEXT: usize = 64;

/// Amounts are kept in billionths of one, as Kubernetes does.
const NANOS: i128 = 1_000_000_000;

/// Why a text is no quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantityError {
    /// It is not of the form `number[suffix]`.
    #[error("is not a quantity: expected a number with a suffix such as Mi, Gi, M, G or m")]
    Malformed,
    /// It is beyond what 64 bits hold.
    #[error("is out of range: at most 2^63-1")]
    OutOfRange,
}

/// A quantity as the user wrote it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quantity(String);

/// The amount that a quantity stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount {
    nanos: i128,
}

impl Quantity {
    /// A quantity of this text, which is not read yet.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The quantity of a number of bytes, in the largest binary unit that is exact.
    #[must_use]
    pub fn from_bytes(bytes: u64) -> Self {
        const UNITS: [(u32, &str); 6] = [
            (60, "Ei"),
            (50, "Pi"),
            (40, "Ti"),
            (30, "Gi"),
            (20, "Mi"),
            (10, "Ki"),
        ];
        for (shift, unit) in UNITS {
            if bytes != 0 && bytes.trailing_zeros() >= shift {
                return Self(format!("{}{unit}", bytes >> shift));
            }
        }
        Self(bytes.to_string())
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What the text stands for.
    ///
    /// # Errors
    ///
    /// The text is not a quantity, or does not fit.
    pub fn amount(&self) -> Result<Amount, QuantityError> {
        parse(&self.0)
    }

    /// The amount in bytes, rounded up; `None` where it is malformed or negative.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.amount()
            .ok()
            .and_then(|amount| u64::try_from(amount.ceil()).ok())
    }
}

impl Amount {
    /// Nothing.
    pub const ZERO: Self = Self { nanos: 0 };

    /// A whole number.
    #[must_use]
    pub const fn whole(number: i64) -> Self {
        // Cannot overflow: 2^63 · 10^9 is below 2^93.
        Self {
            nanos: number as i128 * NANOS,
        }
    }

    /// Rounded up to a whole number.
    #[must_use]
    pub fn ceil(self) -> i64 {
        let floor = self.nanos.div_euclid(NANOS);
        let up = i128::from(self.nanos.rem_euclid(NANOS) != 0);
        i64::try_from(floor + up).unwrap_or(i64::MAX)
    }

    /// Rounded up to a whole number of thousandths: CPU time in millicores.
    #[must_use]
    pub fn millis(self) -> i64 {
        const NANOS_PER_MILLI: i128 = NANOS / 1000;
        let floor = self.nanos.div_euclid(NANOS_PER_MILLI);
        let up = i128::from(self.nanos.rem_euclid(NANOS_PER_MILLI) != 0);
        i64::try_from(floor + up).unwrap_or(i64::MAX)
    }

    /// Whether it is a whole number.
    #[must_use]
    pub fn is_whole(self) -> bool {
        self.nanos % NANOS == 0
    }

    /// Whether it is below zero.
    #[must_use]
    pub fn is_negative(self) -> bool {
        self.nanos < 0
    }
}

/// What a suffix multiplies by: a fraction of two whole numbers.
fn multiplier(suffix: &str) -> Result<(i128, i128), QuantityError> {
    let of_two = |shift: u32| Ok((1_i128 << shift, 1));
    let of_ten = |power: u32| Ok((10_i128.pow(power), 1));
    match suffix {
        "n" => Ok((1, 1_000_000_000)),
        "u" => Ok((1, 1_000_000)),
        "m" => Ok((1, 1_000)),
        "" => Ok((1, 1)),
        "k" => of_ten(3),
        "M" => of_ten(6),
        "G" => of_ten(9),
        "T" => of_ten(12),
        "P" => of_ten(15),
        "E" => of_ten(18),
        "Ki" => of_two(10),
        "Mi" => of_two(20),
        "Gi" => of_two(30),
        "Ti" => of_two(40),
        "Pi" => of_two(50),
        "Ei" => of_two(60),
        _ => exponent(suffix),
    }
}

/// `e9`, `E-3`: a decimal exponent.
fn exponent(suffix: &str) -> Result<(i128, i128), QuantityError> {
    let digits = suffix
        .strip_prefix(['e', 'E'])
        .ok_or(QuantityError::Malformed)?;
    let (negative, digits) = match digits.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, digits.strip_prefix('+').unwrap_or(digits)),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(QuantityError::Malformed);
    }
    let power: u32 = digits.parse().map_err(|_| QuantityError::OutOfRange)?;
    // Below a billionth everything is rounded up to one; above 10^18 nothing but zero fits.
    match 10_i128.checked_pow(power).filter(|_| power <= 27) {
        Some(factor) if negative => Ok((1, factor)),
        Some(factor) => Ok((factor, 1)),
        None => Err(QuantityError::OutOfRange),
    }
}

fn parse(text: &str) -> Result<Amount, QuantityError> {
    if text.len() > MAX_TEXT {
        return Err(QuantityError::Malformed);
    }
    let (negative, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let number_end = rest
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(rest.len());
    let (number, suffix) = rest.split_at(number_end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() + fraction.len() == 0 || fraction.contains('.') {
        return Err(QuantityError::Malformed);
    }
    let (numerator, denominator) = multiplier(suffix)?;

    let mut digits: i128 = 0;
    for byte in whole.bytes().chain(fraction.bytes()) {
        digits = digits
            .checked_mul(10)
            .and_then(|digits| digits.checked_add(i128::from(byte - b'0')))
            .ok_or(QuantityError::OutOfRange)?;
    }
    let places = u32::try_from(fraction.len()).map_err(|_| QuantityError::Malformed)?;
    let over = 10_i128
        .checked_pow(places)
        .and_then(|over| over.checked_mul(denominator))
        .ok_or(QuantityError::OutOfRange)?;
    let scaled = digits
        .checked_mul(numerator)
        .and_then(|scaled| scaled.checked_mul(NANOS))
        .ok_or(QuantityError::OutOfRange)?;
    // Rounded away from zero to a billionth, as Kubernetes does.
    let mut nanos = scaled / over;
    if scaled % over != 0 {
        nanos += 1;
    }
    if nanos > i128::from(i64::MAX) * NANOS {
        return Err(QuantityError::OutOfRange);
    }
    Ok(Amount {
        nanos: if negative { -nanos } else { nanos },
    })
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Quantity;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a quantity: a string or a number")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Quantity, E> {
                Ok(Quantity::new(text))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Quantity, E> {
                Ok(Quantity::new(number.to_string()))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Quantity, E> {
                Ok(Quantity::new(number.to_string()))
            }
            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Quantity, E> {
                Ok(Quantity::new(number.to_string()))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Quantity {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Quantity".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "anyOf": [{ "type": "integer" }, { "type": "string" }],
            "x-kubernetes-int-or-string": true,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_suffix_is_read_exactly() {
        for (text, bytes) in [
            ("0", 0),
            ("128974848", 128_974_848),
            ("+3", 3),
            ("129e6", 129_000_000),
            ("129M", 129_000_000),
            ("123Mi", 123 << 20),
            ("1.5Gi", 3 << 29),
            (".5Ki", 512),
            ("2.", 2),
            ("1E3", 1000),
            ("12E-1", 2),
            ("100m", 1),
            ("7Ei", 7 << 60),
            ("1n", 1),
        ] {
            assert_eq!(
                Quantity::new(text).amount().unwrap().ceil(),
                bytes,
                "{text}"
            );
        }
        assert_eq!(Quantity::new("1500m").amount().unwrap().millis(), 1500);
        assert_eq!(Quantity::new("0.1").amount().unwrap().millis(), 100);
        assert!(!Quantity::new("1500m").amount().unwrap().is_whole());
    }

    #[test]
    fn what_is_no_quantity_is_malformed() {
        let long = "1".repeat(MAX_TEXT + 1);
        for text in [
            "", "Gi", "-", "1 Gi", "1gi", "1e30Gi", "1e", "1.2.3", "0x10", "1e+", "１", "∞", "1\n",
            &long,
        ] {
            assert_eq!(
                Quantity::new(text).amount(),
                Err(QuantityError::Malformed),
                "{text:?}"
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_out_of_range() {
        for text in [
            "8Ei",
            "1e19",
            "1e30",
            "1e999999999999",
            "9223372036854775808",
            "999999E",
        ] {
            assert_eq!(
                Quantity::new(text).amount(),
                Err(QuantityError::OutOfRange),
                "{text}"
            );
        }
    }

    #[test]
    fn a_negative_quantity_has_no_bytes() {
        let quantity = Quantity::new("-1Gi");
        assert!(quantity.amount().unwrap().is_negative());
        assert_eq!(quantity.bytes(), None);
    }

    #[test]
    fn the_text_of_the_user_is_kept() {
        for json in [r#""1.50Gi""#, r#""1e3""#] {
            let quantity: Quantity = serde_json::from_str(json).unwrap();
            assert_eq!(serde_json::to_string(&quantity).unwrap(), json);
        }
        let quantity: Quantity = serde_json::from_str("2").unwrap();
        assert_eq!(quantity.as_str(), "2");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,70}") {
            let _ = Quantity::new(text).amount();
        }

        #[test]
        fn bytes_survive_their_text(bytes in 0_u64..=i64::MAX as u64) {
            prop_assert_eq!(Quantity::from_bytes(bytes).bytes(), Some(bytes));
        }
    }
}
