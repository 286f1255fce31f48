//! Public keys for SSH.

/// Most bytes of a key: those of RSA with 16384 bits, with options before it.
const MAX_KEY: usize = 16 << 10;

/// Returns the keys of a text: one a line, without blank ones and comments.
pub fn ssh_keys(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim);
    let keys = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    keys.map(str::to_owned).collect()
}

/// Tells why `key` is not one line of a file of authorized keys.
pub(crate) fn check(key: &str) -> Result<(), &'static str> {
    let has_word = |word: &str| word.len() >= 16 && word.bytes().all(is_base64);
    match key {
        _ if key.len() > MAX_KEY => Err("it is longer than 16 KiB"),
        _ if key.contains(char::is_control) => Err("it has a line break or another control"),
        _ if !key.split_ascii_whitespace().any(has_word) => Err("there is no key in it"),
        _ => Ok(()),
    }
}

fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_lines_that_are_neither_blank_nor_comments() {
        let text = "ssh-ed25519 AAAAone a@b\n\n  ssh-rsa AAAAtwo\r\n# none\n";
        assert_eq!(
            ssh_keys(text),
            ["ssh-ed25519 AAAAone a@b", "ssh-rsa AAAAtwo"]
        );
    }

    #[test]
    fn what_is_no_key_is_told() {
        let good = "from=\"10.0.0.0/8\" ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA user@host";
        assert_eq!(check(good), Ok(()));
        let two = format!("{good}\n{good}");
        let long = "A".repeat(MAX_KEY + 1);
        for bad in ["", "ssh-rsa", "ssh-rsa AAAA", &two, &long] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }
}
