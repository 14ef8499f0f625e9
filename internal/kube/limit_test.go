package kube_test

import (
	"errors"
	"io"
	"math"
	"strings"
	"testing"

	"github.com/towline/towline/internal/kube"
)

func TestBudget(t *testing.T) {
	t.Parallel()
	exceeded := errors.New("exceeded")
	for name, test := range map[string]struct {
		bytes, values int64
		body          string
		wantErr       string
	}{
		"within both limits":           {10, 2, `{"a":"[,"}`, ""},
		"too many bytes":               {9, 2, `{"a":"[,"}`, "exceeded"},
		"too many values":              {10, 2, `{"a":[[]]}`, "exceeded"},
		"Protobuf":                     {10, 2, "k8s\x00", "the cluster returned Protobuf, which was not requested"},
		"Protobuf, no limit of values": {10, math.MaxInt64, "k8s\x00", ""},
		"an empty body":                {10, 2, "", ""},
	} {
		budget := kube.NewBudget(test.bytes, test.values, exceeded)
		_, err := io.ReadAll(budget.Limit(io.NopCloser(strings.NewReader(test.body))))
		if got := errorText(err); got != test.wantErr {
			t.Errorf("%s: got error %q, want %q", name, got, test.wantErr)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
