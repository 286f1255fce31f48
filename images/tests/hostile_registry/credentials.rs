//! Redirects, tokens, and who sees the credentials.

use super::*;

#[tokio::test]
async fn redirects_are_followed_a_few_times_only() {
    let image = TestImage::small();
    let server = Faulty::serve(image, |request| {
        let again = Reply::new(307, "").header("Location", format!("{}x", request.path));
        request.path.contains("/blobs/").then_some(again)
    });
    let message = refused(&server, &TestStore::new()).await;
    assert!(message.contains("too many redirects"), "{message}");
    let server = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::new(302, "").header("Location", "file:///etc/passwd"))
    });
    assert!(
        refused(&server, &TestStore::new())
            .await
            .contains("it is not HTTPS")
    );
}

#[tokio::test]
async fn credentials_do_not_follow_a_redirect_to_another_host() {
    let image = TestImage::small();
    let elsewhere = Faulty::serve(image.clone(), |_| None);
    let target = elsewhere.host.clone();
    let server = Faulty::serve(image, move |request| {
        if !request.headers.contains_key("authorization") {
            return Some(Reply::new(401, "").header("WWW-Authenticate", "Basic realm=\"r\""));
        }
        let there = format!("http://{target}{}", request.path);
        request
            .path
            .contains("/blobs/")
            .then(|| Reply::new(307, "").header("Location", there))
    });
    let test = TestStore::new();
    let credentials = podvisor_images::Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    test.store
        .pull(&server.name(), &options().credentials(credentials))
        .await
        .unwrap();
    let seen = elsewhere.requests.lock().unwrap();
    assert!(!seen.is_empty());
    assert!(
        seen.iter()
            .all(|request| !request.headers.contains_key("authorization"))
    );
}

#[tokio::test]
async fn tokens_come_from_the_server_that_the_challenge_names_and_bad_ones_are_refused() {
    for (token, good) in [
        (r#"{"token":"t"}"#, true),
        (r#"{"access_token":"t"}"#, true),
        (r#"{"token":"a\nb"}"#, false),
        ("{}", false),
    ] {
        let tokens = Faulty::serve(TestImage::small(), move |_| Some(Reply::new(200, token)));
        let challenge = format!(
            "Bearer realm=\"http://{}/token\",service=\"s\"",
            tokens.host
        );
        let server = Faulty::serve(TestImage::small(), move |request| {
            let known = request
                .headers
                .get("authorization")
                .is_some_and(|header| header == "Bearer t");
            (!known).then(|| Reply::new(401, "").header("WWW-Authenticate", challenge.clone()))
        });
        let test = TestStore::new();
        let pulled = test.pull(&server.name()).await;
        assert_eq!(pulled.is_ok(), good, "{token}");
        assert!(tokens.paths()[0].starts_with("/token?scope=repository%3Aapp%3Apull&service=s"));
        if let Err(error) = pulled {
            assert!(explain(&error).contains("token"), "{}", explain(&error));
        }
    }
}

#[tokio::test]
async fn a_registry_that_redirects_to_another_gets_an_anonymous_token_there() {
    let image = TestImage::small();
    let blob = Digest::of(&image.config).to_string();
    let tokens = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::new(200, r#"{"token":"t"}"#))
    });
    let challenge = format!("Bearer realm=\"http://{}/token\"", tokens.host);
    let storage = Faulty::serve(image.clone(), |_| None);
    let target = storage.host.clone();
    let elsewhere = Faulty::serve(image.clone(), move |request| {
        let header = request.headers.get("authorization");
        if header.is_none_or(|header| header != "Bearer t") {
            return Some(Reply::new(401, "").header("WWW-Authenticate", challenge.clone()));
        }
        let there = format!("http://{target}{}", request.path);
        let moved = request.path.contains(&blob);
        moved.then(|| Reply::new(307, "").header("Location", there))
    });
    let target = elsewhere.host.clone();
    let own = "Basic dTpw";
    let server = Faulty::serve(image, move |request| {
        let header = request.headers.get("authorization");
        Some(if header.is_none_or(|header| header != own) {
            Reply::new(401, "").header("WWW-Authenticate", "Basic realm=\"r\"")
        } else {
            let there = format!("http://{target}{}", request.path);
            Reply::new(307, "").header("Location", there)
        })
    });
    let credentials = podvisor_images::Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    let options = options().credentials(credentials);
    let test = TestStore::new();
    let pulled = test.store.pull(&server.name(), &options).await;
    pulled.unwrap();
    let headers = |server: &Faulty| -> Vec<_> {
        let seen = server.requests.lock().unwrap();
        let header =
            |request: &support::faulty::Request| request.headers.get("authorization").cloned();
        seen.iter().map(header).collect()
    };
    assert_eq!(headers(&tokens), [None]);
    assert_eq!(tokens.paths(), ["/token?scope=repository%3Aapp%3Apull"]);
    assert_eq!(headers(&storage), [None]);
    let seen = headers(&elsewhere);
    assert!(
        seen.iter().flatten().all(|header| header == "Bearer t"),
        "{seen:?}"
    );
}

#[tokio::test]
async fn only_the_registry_itself_sees_the_credentials() {
    for bearer in [true, false] {
        let thief = Faulty::serve(TestImage::small(), |_| {
            Some(Reply::new(200, r#"{"token":"t"}"#))
        });
        let challenge = match bearer {
            true => format!("Bearer realm=\"http://{}/token\",service=\"s\"", thief.host),
            false => "Basic realm=\"r\"".to_owned(),
        };
        let elsewhere = Faulty::serve(TestImage::small(), move |_| {
            Some(Reply::new(401, "").header("WWW-Authenticate", challenge.clone()))
        });
        let target = elsewhere.host.clone();
        let server = Faulty::serve(TestImage::small(), move |request| {
            let there = format!("http://{target}{}", request.path);
            Some(Reply::new(307, "").header("Location", there))
        });
        let test = TestStore::new();
        let credentials = podvisor_images::Credentials::IdentityToken("secret".into());
        let error = test
            .store
            .pull(&server.name(), &options().credentials(credentials))
            .await
            .unwrap_err();
        assert!(!elsewhere.paths().is_empty(), "{}", explain(&error));
        // An anonymous token is asked for, and nothing else.
        for request in thief.requests.lock().unwrap().iter() {
            assert_eq!(request.method, "GET", "{request:?}");
            assert!(!format!("{request:?}").contains("secret"), "{request:?}");
        }
        assert!(bearer || thief.paths().is_empty(), "{:?}", thief.paths());
        for request in elsewhere.requests.lock().unwrap().iter() {
            assert!(!format!("{request:?}").contains("secret"), "{request:?}");
        }
        assert!(explain(&error).contains("log in"), "{}", explain(&error));
    }
}

#[tokio::test]
async fn a_token_server_may_redirect_and_the_password_stays() {
    let basic = || podvisor_images::Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    let identity = || podvisor_images::Credentials::IdentityToken("secret".into());
    for (credentials, leaves, good) in [
        (basic(), true, true),
        (identity(), false, true),
        (identity(), true, false),
    ] {
        let token = r#"{"token":"t"}"#;
        let other = Faulty::serve(TestImage::small(), move |_| Some(Reply::new(200, token)));
        let there = match leaves {
            true => format!("http://{}/new", other.host),
            false => "/token/".to_owned(),
        };
        let tokens = Faulty::serve(TestImage::small(), move |request| {
            let moved = Reply::new(308, "").header("Location", there.clone());
            let arrived = request.path.starts_with("/token/");
            Some(if arrived {
                Reply::new(200, token)
            } else {
                moved
            })
        });
        let challenge = format!("Bearer realm=\"http://{}/token\"", tokens.host);
        let server = Faulty::serve(TestImage::small(), move |request| {
            let header = request.headers.get("authorization");
            header
                .is_none_or(|header| header != "Bearer t")
                .then(|| Reply::new(401, "").header("WWW-Authenticate", challenge.clone()))
        });
        let options = options().credentials(credentials);
        let pulled = TestStore::new().store.pull(&server.name(), &options).await;
        match pulled {
            Ok(_) => assert!(good),
            Err(error) => {
                let message = explain(&error);
                assert!(
                    !good && message.contains("not sent to another"),
                    "{message}"
                );
            }
        }
        for request in other.requests.lock().unwrap().iter() {
            assert!(good, "{request:?}");
            assert_eq!(request.headers.get("authorization"), None);
        }
    }
}

#[tokio::test]
async fn who_may_not_pull_is_told_to_log_in() {
    let server = Faulty::serve(TestImage::small(), |_| {
        Some(Reply::new(401, "").header("WWW-Authenticate", "Basic realm=\"r\""))
    });
    let message = refused(&server, &TestStore::new()).await;
    assert!(message.contains("docker login"), "{message}");
    assert_eq!(server.paths().len(), 1);
}
