//! podvisor's guest agent, which a guest without one gets from the disk.
//!
//! It is brought by vendor-data, which leaves the user's configuration as it is: a boothook, which
//! cloud-init runs at each boot before everything else, and not only if nothing goes wrong before.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// The program on the disk.
pub(crate) const FILE: &str = "podvisor-ga";

/// What comes before a boothook that stands alone.
const HEADER: &str = "#cloud-boothook\n";

/// The script, but for the disk's label.
const HOOK: &str = include_str!("agent-hook.sh");

/// Between the parts of vendor-data of several; no line of base64 begins with a hyphen.
const BOUNDARY: &str = "podvisor-vendor-data";

/// Characters of a line of base64 (RFC 2045 §6.8).
const LINE: usize = 76;

/// Vendor-data with the script, and with the configuration that is there besides.
pub(crate) fn vendor_data(label: &str, config: Option<&[u8]>) -> Vec<u8> {
    let hook = HOOK.replace("@LABEL@", label);
    let Some(config) = config else {
        return format!("{HEADER}{hook}").into_bytes();
    };
    let mut text =
        format!("Content-Type: multipart/mixed; boundary=\"{BOUNDARY}\"\nMIME-Version: 1.0\n");
    for (kind, part) in [
        ("cloud-config", config),
        ("cloud-boothook", hook.as_bytes()),
    ] {
        text.push_str(&format!(
            "\n--{BOUNDARY}\nContent-Type: text/{kind}; charset=\"utf-8\"\n\
             Content-Transfer-Encoding: base64\n\n"
        ));
        let encoded = STANDARD.encode(part);
        let mut rest = encoded.as_str();
        while !rest.is_empty() {
            let (line, after) = rest.split_at(rest.len().min(LINE));
            text.push_str(line);
            text.push('\n');
            rest = after;
        }
    }
    text.push_str(&format!("\n--{BOUNDARY}--\n"));
    text.into_bytes()
}
