//! The files of /etc with which a guest resolves names.

use std::fmt::Write as _;
use std::net::IpAddr;

use super::result::Dns;

/// Most entries of a kind that are taken from a host's file.
const MAX_ENTRIES: usize = 64;

/// Where systemd-resolved lists the servers that its own server, on the loopback, uses.
const UPSTREAM: &str = "/run/systemd/resolve/resolv.conf";

/// Formats /etc/hosts.
pub fn hosts(hostname: &str, addresses: &[IpAddr]) -> Vec<u8> {
    let mut text = String::from(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n",
    );
    for address in addresses {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{address}\t{hostname}");
    }
    text.into_bytes()
}

impl Dns {
    /// Formats /etc/resolv.conf.
    pub fn to_resolv_conf(&self) -> String {
        let mut text = String::new();
        if !self.search.is_empty() {
            let _ = writeln!(text, "search {}", self.search.join(" "));
        }
        for server in &self.nameservers {
            let _ = writeln!(text, "nameserver {server}");
        }
        if !self.options.is_empty() {
            let _ = writeln!(text, "options {}", self.options.join(" "));
        }
        text
    }

    /// Returns the host's own configuration, without servers that only the host can reach. If none
    /// is left, the servers of systemd-resolved are used.
    pub fn of_host() -> Self {
        let read = |path| Self::parse(&std::fs::read_to_string(path).unwrap_or_default());
        let own = read("/etc/resolv.conf").reachable();
        match own.nameservers.is_empty() {
            false => own,
            true => {
                let upstream = read(UPSTREAM).reachable();
                let nameservers = upstream.nameservers;
                Self { nameservers, ..own }
            }
        }
    }

    fn reachable(mut self) -> Self {
        let is_reachable = |server: &String| {
            let address = server.parse::<IpAddr>();
            address.is_ok_and(|address| !address.is_loopback() && !address.is_unspecified())
        };
        self.nameservers.retain(is_reachable);
        self
    }

    /// Parses a resolv.conf as the C library does: of several search lists the last one counts, and
    /// unknown lines are skipped.
    fn parse(text: &str) -> Self {
        let mut dns = Self::default();
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            let keyword = words.next();
            let words = words.take_while(|word| !word.starts_with(['#', ';']));
            let mut words = words.map(str::to_owned).take(MAX_ENTRIES);
            match keyword {
                Some("nameserver") => dns.nameservers.extend(words.next()),
                Some("search" | "domain") => dns.search = words.collect(),
                Some("options") => dns.options.extend(words),
                _ => {}
            }
        }
        dns.nameservers.truncate(MAX_ENTRIES);
        dns.options.truncate(MAX_ENTRIES);
        dns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_names_the_pod() {
        let text = hosts(
            "web",
            &["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
        );
        let text = String::from_utf8(text).unwrap();
        assert!(text.ends_with("10.0.0.2\tweb\nfd00::2\tweb\n"), "{text}");
    }

    #[test]
    fn servers_that_only_the_host_reaches_are_left_out() {
        let text = "# made by hand\nnameserver 127.0.0.53\nnameserver ::1\n\
                    nameserver 192.0.2.1 # the router\nnameserver 2001:db8::1\nnameserver x\n\
                    domain old.example\nsearch a.example b.example\noptions ndots:2 edns0\n\
                    sortlist 10.0.0.0\n";
        let dns = Dns::parse(text).reachable();
        assert_eq!(
            dns.to_resolv_conf(),
            "search a.example b.example\nnameserver 192.0.2.1\nnameserver 2001:db8::1\n\
             options ndots:2 edns0\n"
        );
        assert_eq!(Dns::parse("\n;\nnameserver").reachable(), Dns::default());
    }
}
