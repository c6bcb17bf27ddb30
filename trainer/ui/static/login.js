// A link with #token=... logs in by itself; the token leaves the address bar and the history first.
"use strict";
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  history.replaceState(null, "", location.pathname);
  const form = document.getElementById("login");
  form.elements.token.value = given;
  form.submit();
}
