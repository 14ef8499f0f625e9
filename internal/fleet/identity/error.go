package identity

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
	"golang.org/x/oauth2"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

const (
	// maxReason is how many bytes of what a provider says fit into a status.
	maxReason = 400
	// maxAnswer is how many bytes of an answer that refuses a token are read.
	maxAnswer = 16 << 10
)

// tokenError says why there is no token.
type tokenError struct {
	provider libv1beta1.WorkloadIdentityProvider
	err      error
}

// Error is one line: libraries say it in many, and the status of a cluster has one.
func (e *tokenError) Error() string {
	return fmt.Sprintf("workload identity: get a token from %s: %s", e.provider, reason(e.err))
}

func (e *tokenError) Unwrap() error { return e.err }

func reason(err error) string {
	text := err.Error()
	var oauth *oauth2.RetrieveError
	var azure *azidentity.AuthenticationFailedError
	switch {
	case errors.As(err, &oauth) && oauth.Response != nil:
		text = answered(oauth.Response, oauth.Body)
	case errors.As(err, &azure) && azure.RawResponse != nil:
		// What cannot be read is left out.
		body, _ := io.ReadAll(io.LimitReader(azure.RawResponse.Body, maxAnswer))
		text = answered(azure.RawResponse, body)
	}
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > maxReason {
		text = strings.ToValidUTF8(text[:maxReason], "") + "..."
	}
	return text
}

// answered says what a token endpoint answered. Of the body it shows only what RFC 6749 has for people.
func answered(response *http.Response, body []byte) string {
	var said struct {
		Error       string `json:"error"`
		Description string `json:"error_description"`
	}
	text := response.Status
	if response.Request != nil && response.Request.URL != nil {
		text = response.Request.URL.Host + " answered " + text
	}
	if json.Unmarshal(body, &said) == nil && said.Error != "" {
		text += ": " + said.Error
		if said.Description != "" {
			text += ": " + said.Description
		}
	}
	return text
}
