package clusterstatus

import (
	"net/http"
	"testing"
	"unicode/utf8"

	"github.com/towline/towline/test/fuzzing"
)

// FuzzReadyCondition reads the responses of a member's API server, which are written to a condition.
func FuzzReadyCondition(f *testing.F) {
	f.Add(http.StatusInternalServerError, "[+]ping ok\n[-]etcd failed: reason withheld\n[-]poststarthook/x failed\n")
	f.Add(http.StatusOK, "ok")
	f.Add(-1, "[-]\xff\r")
	f.Fuzz(func(t *testing.T, code int, body string) {
		fuzzing.Within(t, 16<<20+uint64(len(body))*100, func() {
			ready := readyCondition("readyz", code, body, nil)
			if ready.Message == "" || ready.Reason == "" || len(ready.Message) > 32<<10 {
				t.Errorf("got %q: %d bytes", ready.Reason, len(ready.Message))
			}
			if utf8.ValidString(body) && !utf8.ValidString(ready.Message) {
				t.Errorf("the message is not UTF-8: %q", ready.Message)
			}
		})
	})
}
