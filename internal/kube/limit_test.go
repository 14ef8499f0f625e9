package kube_test

import (
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"testing/iotest"

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

func TestRequireObject(t *testing.T) {
	t.Parallel()
	for body, isObject := range map[string]bool{
		`{"kind":"List","apiVersion":"v1"}`:                                             true,
		` {"items":[{"a":"\\\"kind"}], "apiVersion" : "v1", "metadata":{}, "kind":"A"}`: true,
		"":                                     true, // a response without a body
		`{"password":"kind"}`:                  false,
		`{"a":{"kind":"A","apiVersion":"v1"}}`: false,
		`[{"kind":"A","apiVersion":"v1"}]`:     false,
		`{"kind":"A"}`:                         false,
		`{"a":"\"kind\":1,\"apiVersion\":2"}`:  false,
		"kind: A\napiVersion: v1\n":            false,
		`{"kind":"","apiVersion":"v1"}`:        false,
		`{"kind":"A","apiVersion":"v1/"}`:      false,
		`{"kind":["A"],"apiVersion":"v1"}`:     false,
		`{"apiVersion":"v1","kind":1}`:         false,
		// Decoders take the last field.
		`{"kind":"A","apiVersion":"v1","KIND":""}`:                     false,
		`{"kind":"A","apiVersion":"v1","\u006bind":""}`:                false,
		`{"kind":"A","apiVersion":"v1","items":[{"Kind":"","a":"/"}]}`: true,
	} {
		for name, reader := range map[string]io.Reader{"whole": strings.NewReader(body), "by bytes": iotest.OneByteReader(strings.NewReader(body))} {
			raw, err := io.ReadAll(kube.RequireObject(io.NopCloser(reader)))
			if (err == nil) != isObject || isObject && string(raw) != body {
				t.Errorf("%s, %s: got %q and error %v", body, name, raw, err)
			}
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
