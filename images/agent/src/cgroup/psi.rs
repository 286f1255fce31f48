//! Pressure stall information of a control group: how long its processes waited for CPUs, memory
//! and disks, as the kernel counts it when `psi=1` is on its command line (Linux,
//! Documentation/accounting/psi.rst).

use podvisor_agent_protocol::api::{Psi, PsiData, PsiStats};

/// Returns the pressure of the group whose files `read` reads; `None` if it has no such files.
#[must_use]
pub fn of(read: impl Fn(&str) -> Option<String>) -> Option<Psi> {
    let stats = |name| read(name).as_deref().and_then(stats);
    let psi = Psi {
        cpu: stats("cpu.pressure").into(),
        memory: stats("memory.pressure").into(),
        io: stats("io.pressure").into(),
        ..Default::default()
    };
    (psi != Psi::default()).then_some(psi)
}

/// Parses lines `some avg10=… avg60=… avg300=… total=…` and `full …`, which not all kernels have
/// for CPUs.
fn stats(text: &str) -> Option<PsiStats> {
    let of = |name| text.lines().find_map(|line| data(line.strip_prefix(name)?));
    Some(PsiStats {
        some: Some(of("some ")?).into(),
        full: of("full ").into(),
        ..Default::default()
    })
}

fn data(line: &str) -> Option<PsiData> {
    let value = |name: &str| {
        let mut items = line.split_ascii_whitespace();
        items.find_map(|item| item.strip_prefix(name)?.strip_prefix('='))
    };
    Some(PsiData {
        total_us: value("total")?.parse().ok()?,
        avg10: hundredths(value("avg10")?)?,
        avg60: hundredths(value("avg60")?)?,
        avg300: hundredths(value("avg300")?)?,
        ..Default::default()
    })
}

/// Parses a percentage, which the kernel writes with two decimals.
fn hundredths(percentage: &str) -> Option<u32> {
    let (whole, decimals) = percentage.split_once('.')?;
    let is_sound = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_sound(whole) || !is_sound(decimals) || decimals.len() != 2 {
        return None;
    }
    let whole: u32 = whole.parse().ok()?;
    let decimals: u32 = decimals.parse().ok()?;
    whole.checked_mul(100)?.checked_add(decimals)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pressure_is_read_in_hundredths_of_a_percent_and_microseconds() {
        let text = "some avg10=12.05 avg60=3.40 avg300=100.00 total=123456789\n\
                    full avg10=0.00 avg60=0.99 avg300=1.00 total=7\n";
        let stats = stats(text).unwrap();
        let (some, full) = (&stats.some, &stats.full);
        assert_eq!((some.avg10, some.avg60, some.avg300), (1205, 340, 10_000));
        assert_eq!((full.avg10, full.avg60, full.avg300), (0, 99, 100));
        assert_eq!((some.total_us, full.total_us), (123_456_789, 7));
    }

    #[test]
    fn what_is_not_there_or_not_sound_is_none_and_not_zero() {
        assert_eq!(of(|_| None), None);
        let some = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0";
        let psi = of(|name| (name == "memory.pressure").then(|| some.to_owned())).unwrap();
        assert!(psi.memory.some.is_some() && psi.memory.full.is_none());
        assert!(psi.cpu.is_none() && psi.io.is_none());
        for text in [
            "",
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=0",
            "some avg10=0.00 avg60=0.00 total=0",
            "some avg10=0.0 avg60=0.00 avg300=0.00 total=0",
            "some avg10=nan avg60=0.00 avg300=0.00 total=0",
            "some avg10=+1.00 avg60=0.00 avg300=0.00 total=0",
            "some avg10=-1.00 avg60=0.00 avg300=0.00 total=0",
            "some avg10=99999999.00 avg60=0.00 avg300=0.00 total=0",
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=99999999999999999999",
        ] {
            assert_eq!(stats(text), None, "{text}");
        }
    }

    /// Text similar to the kernel's lines, well-formed or not.
    const ALIKE: &str =
        "((some|full)( (avg10|avg60|avg300|total)=[0-9]{0,22}[.]?[0-9]{0,3}){0,4}\n){0,3}";

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in "\\PC{0,60}") {
            let _ = stats(&text);
        }

        #[test]
        fn lines_like_the_kernels_are_read_without_panic(text in ALIKE) {
            let _ = stats(&text);
        }
    }
}
